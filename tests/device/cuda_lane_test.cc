#include "server/device/cuda_lane.h"

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

constexpr size_t kBytes = 4 * UploadBlock::kAlignment;

class UploadBlockTest : public ::testing::Test {
 protected:
  alignas(UploadBlock::kAlignment) std::byte host_[kBytes];
  std::byte device_[kBytes];  // never read or written
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

TEST_F(UploadBlockTest, CountsTheBytesToUpload) {
  EXPECT_EQ(block_.used(), 0u);
  block_.Take(10);
  EXPECT_EQ(block_.used(), 64u);
  block_.Take(100);
  EXPECT_EQ(block_.used(), 192u);
}

TEST_F(UploadBlockTest, RewindTakesBackTheNewestPieces) {
  block_.Take(10);
  const size_t used = block_.used();
  block_.Take(100);
  block_.Rewind(used);
  EXPECT_EQ(block_.used(), 64u);
  EXPECT_EQ(block_.Take(10), host_ + 64);
}

TEST_F(UploadBlockTest, IsWholeAgainAfterARewindToTheStart) {
  block_.Take(kBytes);
  block_.Rewind(0);
  EXPECT_EQ(block_.used(), 0u);
  EXPECT_EQ(block_.Take(kBytes), host_);
}

}  // namespace
}  // namespace flashcore::server
