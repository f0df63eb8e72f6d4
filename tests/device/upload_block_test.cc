#include "server/device/upload_block.h"

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

constexpr size_t kBytes = 4 * UploadBlock::kAlignment;

class UploadBlockTest : public ::testing::Test {
 protected:
  alignas(UploadBlock::kAlignment) std::byte host_[kBytes];
  std::byte device_[kBytes];  // only its addresses are used
  UploadBlock block_{host_, device_, kBytes};
};

TEST_F(UploadBlockTest, PiecesAreAlignedAndHaveTheirPlaceOnTheDevice) {
  EXPECT_EQ(block_.Take(1), host_);
  std::byte* const second = block_.Take(65);
  EXPECT_EQ(second, host_ + 64);
  EXPECT_EQ(block_.OnDevice(second + 3), device_ + 67);
  EXPECT_EQ(block_.room(), 64u);
}

TEST_F(UploadBlockTest, RefusesWhatDoesNotFitAndKeepsTheRoom) {
  EXPECT_EQ(block_.Take(kBytes + 1), nullptr);
  EXPECT_EQ(block_.Take(kBytes), host_);
  EXPECT_EQ(block_.Take(1), nullptr);
  EXPECT_NE(block_.Take(0), nullptr);
}

TEST_F(UploadBlockTest, SendsEveryPieceOnce) {
  block_.Take(10);
  UploadBlock::Unsent unsent = block_.TakeUnsent();
  EXPECT_EQ(unsent.host, host_);
  EXPECT_EQ(unsent.device, device_);
  EXPECT_EQ(unsent.bytes, 64u);
  EXPECT_EQ(block_.TakeUnsent().bytes, 0u);
  const size_t used = block_.used();
  block_.Take(100);
  block_.Rewind(used);
  block_.Take(10);
  unsent = block_.TakeUnsent();
  EXPECT_EQ(unsent.host, host_ + 64);
  EXPECT_EQ(unsent.device, device_ + 64);
  EXPECT_EQ(unsent.bytes, 64u);
}

TEST_F(UploadBlockTest, IsWholeAgainOnceCleared) {
  block_.Take(kBytes);
  block_.TakeUnsent();
  block_.Clear();
  EXPECT_EQ(block_.used(), 0u);
  EXPECT_EQ(block_.Take(kBytes), host_);
  EXPECT_EQ(block_.TakeUnsent().bytes, kBytes);
}

}  // namespace
}  // namespace flashcore::server
