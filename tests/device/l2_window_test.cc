#include "server/device/l2_window.h"

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSuperblock = 4 * kMiB;
constexpr size_t kArena = 1024 * kMiB;
constexpr L2Limits kLimits = {39 * kMiB, 128 * kMiB};

TEST(HotSegmentBytesTest, IsWhatTheDeviceAllowsInWholeSuperblocks) {
  EXPECT_EQ(HotSegmentBytes(kLimits, 0, kArena, kSuperblock), 36 * kMiB);
  EXPECT_EQ(HotSegmentBytes({39 * kMiB, 17 * kMiB}, 0, kArena, kSuperblock), 16 * kMiB);
}

TEST(HotSegmentBytesTest, StaysWithinTheBudget) {
  EXPECT_EQ(HotSegmentBytes(kLimits, 10 * kMiB, kArena, kSuperblock), 8 * kMiB);
  EXPECT_EQ(HotSegmentBytes(kLimits, 100 * kMiB, kArena, kSuperblock), 36 * kMiB);
  EXPECT_EQ(HotSegmentBytes(kLimits, kSuperblock - 1, kArena, kSuperblock), 0u);
}

TEST(HotSegmentBytesTest, StaysWithinTheArena) {
  EXPECT_EQ(HotSegmentBytes(kLimits, 0, 9 * kMiB, kSuperblock), 8 * kMiB);
}

TEST(HotSegmentBytesTest, IsEmptyWhereNothingPersists) {
  EXPECT_EQ(HotSegmentBytes({}, 0, kArena, kSuperblock), 0u);
  EXPECT_EQ(HotSegmentBytes({39 * kMiB, 0}, 0, kArena, kSuperblock), 0u);
}

}  // namespace
}  // namespace flashcore::server
