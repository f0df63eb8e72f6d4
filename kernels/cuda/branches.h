// Streams on which kernels of one launch run side by side: each fills what the others leave idle.
//
//   stream     ... fork, kernel of the largest tiles ..., join, combine
//   branch 0             kernel of smaller tiles
//   branch 1             kernel of the smallest tiles ......
#ifndef FLASHCORE_KERNELS_CUDA_BRANCHES_H_
#define FLASHCORE_KERNELS_CUDA_BRANCHES_H_

#include <cuda_runtime_api.h>

#include <array>

#include "kernels/cuda/cuda_raii.h"
#include "kernels/plan_options.h"

namespace flashcore::kernels {

// Used by one launch at a time.
class Branches {
 public:
  // Tiles of every size and cascade items, but for what runs on the stream itself.
  static constexpr int kMost = kTileKinds;

  // On the current device. `priority` is that of the streams to fork.
  cudaError_t Create(int priority);

  // Branches go on from what `stream` has been given so far.
  cudaError_t Fork(cudaStream_t stream) const;
  // The stream of a branch, which waits for that. Once after each Fork.
  cudaError_t Begin(int branch, cudaStream_t* stream) const;
  // `stream` waits for what the branches [0, count) have been given, whatever failed since Fork.
  cudaError_t Join(cudaStream_t stream, int count) const;

  cudaStream_t stream(int branch) const { return streams_[branch].get(); }

 private:
  std::array<CudaStream, kMost> streams_;
  std::array<CudaEvent, kMost> done_;
  CudaEvent forked_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_BRANCHES_H_
