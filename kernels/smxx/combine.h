// Merges the partial results of KV splits, on any CUDA device.
#ifndef FLASHCORE_KERNELS_SMXX_COMBINE_H_
#define FLASHCORE_KERNELS_SMXX_COMBINE_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/partials.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Writes O and LSE of the packed rows of combines[0, count), in split order. `spans`, `combines`
// and the partial results are in device memory; `stream` is a cudaStream_t. Returns 0 or the
// cudaError_t of the launch.
int LaunchCombine(const Geometry& geometry, const Span* spans, const CombineItem* combines,
                  int32_t count, const Partials& partials, void* stream);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_COMBINE_H_
