// Combines the partial results of KV splits, in a launch after the one that wrote them.
#ifndef FLASHCORE_KERNELS_CUDA_COMBINE_H_
#define FLASHCORE_KERNELS_CUDA_COMBINE_H_

#include "kernels/attention.h"
#include "kernels/cuda/launch.h"

namespace flashcore::kernels {

// Writes O and LSE of the packed rows of every tile. `dtype` is that of O. Returns 0 or the
// cudaError_t of the launch.
int LaunchCombine(DType dtype, const LaunchTiles& tiles);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_COMBINE_H_
