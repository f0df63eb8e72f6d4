// In which order the work of branches runs, on a fake GPU.
#include "kernels/cuda/branches.h"

#include <gtest/gtest.h>

#include <string>

#include "server/device/cuda_resources.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_state.h"

namespace flashcore::server {
namespace {

class BranchesTest : public ::testing::Test {
 protected:
  BranchesTest() {
    cudaSetDevice(0);
    CudaAllocator take;
    take.Stream(StreamPriority::kHigh, &stream_);
    take.Branches(StreamPriority::kHigh, &branches_);
    EXPECT_TRUE(take.status().ok()) << take.status();
  }

  void Give(cudaStream_t stream, char piece) {
    EXPECT_EQ(testing::fake_gpu::Push(stream, [this, piece] { ran_ += piece; }), cudaSuccess);
  }

  cudaStream_t Begin(int branch) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(branches_.Begin(branch, &stream), cudaSuccess);
    return stream;
  }

  CudaStream stream_;
  kernels::Branches branches_;
  std::string ran_;
};

TEST_F(BranchesTest, RunBetweenWhatComesBeforeAndAfter) {
  Give(stream_.get(), 'a');
  EXPECT_EQ(branches_.Fork(stream_.get()), cudaSuccess);
  Give(stream_.get(), 'b');
  Give(Begin(0), 'c');
  Give(Begin(1), 'd');
  // A branch that runs first waits for what was there before the fork, and for nothing else.
  EXPECT_EQ(cudaStreamSynchronize(branches_.stream(1)), cudaSuccess);
  EXPECT_EQ(ran_, "ad");
  EXPECT_EQ(branches_.Join(stream_.get(), 2), cudaSuccess);
  Give(stream_.get(), 'e');
  EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  EXPECT_EQ(ran_, "adbce");
}

TEST_F(BranchesTest, JoinAfterALossReturnsItsError) {
  EXPECT_EQ(branches_.Fork(stream_.get()), cudaSuccess);
  for (int i = 0; i < 3; ++i) Begin(i);
  testing::LoseFakeGpu(0, cudaErrorLaunchFailure);
  EXPECT_EQ(branches_.Join(stream_.get(), 3), cudaErrorLaunchFailure);
  testing::RestoreFakeGpus();
}

}  // namespace
}  // namespace flashcore::server
