#include "server/device/l2_window.h"

#include <cuda_runtime_api.h>

#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "server/device/cuda_device.h"

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

constexpr L2ReadTimes kGains = {94, 100};
constexpr L2ReadTimes kSame = {104, 100};
constexpr L2ReadTimes kLoses = {106, 100};

std::string Objection(const L2ReadTimes& between, const L2ReadTimes& beside,
                      const L2ReadTimes& cold = kSame) {
  return L2Probe{1, 7, between, beside, cold}.objection();
}

TEST(L2ProbeTest, TheWindowPaysIfOneReadGainsAndNoneLoses) {
  EXPECT_EQ(Objection(kGains, kGains), "");
  EXPECT_EQ(Objection(kGains, kSame), "");
  EXPECT_EQ(Objection(kSame, kGains), "");
}

TEST(L2ProbeTest, ReadsThatLoseSpeakAgainstTheWindow) {
  EXPECT_EQ(Objection(kLoses, kGains),
            "between other reads 106 us with a window, 100 us without (a loss)");
  EXPECT_EQ(Objection(kGains, kLoses),
            "beside other reads 106 us with a window, 100 us without (a loss)");
  EXPECT_EQ(Objection(kLoses, kLoses),
            "between other reads 106 us with a window, 100 us without (a loss); "
            "beside other reads 106 us with a window, 100 us without (a loss)");
}

TEST(L2ProbeTest, NothingGainedSpeaksAgainstTheWindow) {
  EXPECT_EQ(Objection(kSame, {96, 100}),
            "between other reads 104 us with a window, 100 us without (no gain); "
            "beside other reads 96 us with a window, 100 us without (no gain)");
}

TEST(L2ProbeTest, OtherReadsThatLoseSpeakAgainstTheWindow) {
  EXPECT_EQ(Objection(kGains, kGains, kLoses),
            "reading 7 other bytes 106 us with a window, 100 us without (a loss)");
  EXPECT_EQ(Objection(kSame, kSame, kGains), Objection(kSame, kSame))
      << "they need not gain, and that they do does not matter";
}

// The parameter is the ordinal of a GPU.
class RealL2ProbeTest : public ::testing::TestWithParam<int> {};

TEST_P(RealL2ProbeTest, MeasuresAndLeavesTheDeviceAsItWas) {
  if (absl::Status found = CudaDevice::Find(GetParam()); !found.ok()) GTEST_SKIP() << found;
  ASSERT_EQ(cudaSetDevice(GetParam()), cudaSuccess);
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, GetParam()), cudaSuccess);
  const auto set_aside = L2SetAside();
  if (properties.persistingL2CacheMaxSize == 0 || !set_aside.ok()) {
    GTEST_SKIP() << "its L2 keeps nothing persisting";
  }
  const size_t bytes = static_cast<size_t>(properties.persistingL2CacheMaxSize) / 2 / 4096 * 4096;
  const auto probe = ProbeL2Window(bytes, static_cast<size_t>(properties.l2CacheSize));
  ASSERT_EQ(probe.status(), absl::OkStatus());
  EXPECT_EQ(probe->bytes, bytes);
  for (const L2ReadTimes* us : {&probe->between, &probe->beside, &probe->cold}) {
    EXPECT_GT(us->with_window, 0);
    EXPECT_GT(us->without_window, 0);
    std::cout << bytes << " bytes after " << probe->cold_bytes << " others"
              << (us == &probe->beside ? " and beside as many" : "") << ": " << us->with_window
              << " us with a window, " << us->without_window << " us without" << std::endl;
  }
  EXPECT_EQ(L2SetAside().value(), *set_aside);
}

INSTANTIATE_TEST_SUITE_P(Devices, RealL2ProbeTest, ::testing::Values(0),
                         [](const auto& param) { return "cuda" + std::to_string(param.param); });

}  // namespace
}  // namespace flashcore::server
