#include "server/device/cuda_resources.h"

#include "gtest/gtest.h"
#include "server/device/device.h"

namespace flashcore::server {
namespace {

TEST(CudaStatusTest, SuccessIsOk) {
  EXPECT_EQ(CudaStatus(cudaSuccess, "cudaMalloc"), absl::OkStatus());
  EXPECT_FALSE(IsDeviceLost(absl::OkStatus()));
}

TEST(CudaStatusTest, OutOfMemoryIsResourceExhausted) {
  const absl::Status status = CudaStatus(cudaErrorMemoryAllocation, "cudaMalloc of 7 bytes");
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(status.message(), "cudaMalloc of 7 bytes: out of memory (cudaErrorMemoryAllocation)");
  EXPECT_FALSE(IsDeviceLost(status));
}

TEST(CudaStatusTest, EverythingElseIsInternal) {
  const absl::Status status = CudaStatus(cudaErrorInvalidValue, "cudaMemcpyAsync");
  EXPECT_EQ(status,
            absl::InternalError("cudaMemcpyAsync: invalid argument (cudaErrorInvalidValue)"));
  EXPECT_FALSE(IsDeviceLost(status));
}

TEST(CudaStatusTest, SaysWhichErrorsLoseTheDevice) {
  for (const cudaError_t error :
       {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorECCUncorrectable}) {
    const absl::Status status = CudaStatus(error, "cudaEventSynchronize");
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(IsDeviceLost(status)) << status;
    EXPECT_NE(status.message().find("; the device is lost to this process"), std::string::npos);
  }
  EXPECT_FALSE(IsDeviceLost(absl::InternalError("the CPU kernel failed with 1")));
}

}  // namespace
}  // namespace flashcore::server
