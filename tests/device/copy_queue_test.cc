// On a fake GPU, which refuses what CUDA does.
#include "server/device/copy_queue.h"

#include <cuda_runtime_api.h>

#include <vector>

#include "gtest/gtest.h"
#include "tests/device/fake_gpu.h"

namespace flashcore::server {
namespace {

constexpr size_t kHalf = 64;

// Two neighbours in host memory, registered one by one, and as much device memory.
class CopyQueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&device_, 2 * kHalf), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0), cudaSuccess);
    for (std::byte* half : {host(), host() + kHalf}) {
      ASSERT_EQ(cudaHostRegister(half, kHalf, cudaHostRegisterPortable), cudaSuccess);
    }
  }
  void TearDown() override {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (std::byte* half : {host(), host() + kHalf}) {
      EXPECT_EQ(cudaHostUnregister(half), cudaSuccess);
    }
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFree(device_), cudaSuccess);
  }

  std::byte* host() { return memory_.data(); }
  std::byte* device() { return static_cast<std::byte*>(device_); }
  // The queue compares regions and never uses them.
  static const SharedRegion* Region(const int* name) {
    return reinterpret_cast<const SharedRegion*>(name);
  }
  // Both halves, in copies of a quarter each. Returns how many copies CUDA was given.
  int Copy(const SharedRegion* first, const SharedRegion* second, cudaError_t result) {
    const int before = testing::FakeGpuCopies();
    CopyQueue copies(cudaMemcpyHostToDevice, stream_);
    for (size_t at = 0; at < 2 * kHalf; at += kHalf / 2) {
      copies.Add(at < kHalf ? first : second, device() + at, host() + at, kHalf / 2);
    }
    EXPECT_EQ(copies.Flush(), result);
    return testing::FakeGpuCopies() - before;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(2 * kHalf);
  void* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(CopyQueueTest, JoinsCopiesWithinARegionOnly) {
  const int one = 1, two = 2;
  EXPECT_EQ(Copy(Region(&one), Region(&two), cudaSuccess), 2);
  EXPECT_EQ(Copy(Region(&one), nullptr, cudaSuccess), 2);
  // As if both were one region, which the GPU refuses.
  EXPECT_EQ(Copy(Region(&one), Region(&one), cudaErrorInvalidValue), 1);
}

}  // namespace
}  // namespace flashcore::server
