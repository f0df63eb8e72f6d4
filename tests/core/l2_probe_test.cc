#include "server/core/l2_probe.h"

#include <cuda_runtime_api.h>

#include <iostream>
#include <string>

#include "gtest/gtest.h"
#include "server/core/cuda_device.h"
#include "server/core/l2_window.h"

namespace flashcore::server {
namespace {

TEST(L2ProbeTest, PaysIfItIsFasterByMoreThanChance) {
  EXPECT_TRUE((L2Probe{1, 1, 9.4, 10}.window_pays()));
  EXPECT_FALSE((L2Probe{1, 1, 9.6, 10}.window_pays()));
  EXPECT_FALSE((L2Probe{1, 1, 12, 10}.window_pays()));
}

// On the GPU of that number.
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
  const size_t bytes = static_cast<size_t>(properties.persistingL2CacheMaxSize) / 2 >> 20 << 20;
  const auto probe = ProbeL2Window(bytes, static_cast<size_t>(properties.l2CacheSize));
  ASSERT_EQ(probe.status(), absl::OkStatus());
  EXPECT_EQ(probe->bytes, bytes);
  EXPECT_GT(probe->us_with_window, 0);
  EXPECT_GT(probe->us_without_window, 0);
  std::cout << bytes << " bytes after " << probe->cold_bytes << " others: " << probe->us_with_window
            << " us with a window, " << probe->us_without_window << " us without" << std::endl;
  EXPECT_EQ(L2SetAside().value(), *set_aside);
}

INSTANTIATE_TEST_SUITE_P(Devices, RealL2ProbeTest, ::testing::Values(0),
                         [](const auto& param) { return "cuda" + std::to_string(param.param); });

}  // namespace
}  // namespace flashcore::server
