// Fused attention on mma.sync.m16n8k16, with float32 sums: the kernel and its launch.
//
// A block attends one work item: a tile of packed query rows to a range of K/V. Scores and
// probabilities never leave the registers of the warp that computed them; O is rescaled as larger
// scores turn up (online softmax) and divided by its sum at the end. The roles: mainloop.cuh copies
// tiles in and multiplies, mask.cuh and softmax.cuh work on the scores in between, epilogue.cuh
// merges warps and writes.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_CUH_
#define FLASHCORE_KERNELS_SM80_ATTEND_CUH_

#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/smxx/launch.cuh"

namespace flashcore::kernels::sm80 {

template <class C>
__global__ void __launch_bounds__(C::kThreads) AttendKernel(const AttendParams params) {
  // By reference: what the epilogue needs of them is read then, and takes no registers before.
  const WorkItem& item = params.items[blockIdx.x];
  const Span& span = params.spans[item.span];
  const Position<C> position;
  const float scale = span.softmax_scale * 1.44269504088896340736f;  // log2(e)
  State<C> state;
  AttendTiles<C>(span, item, params.group, scale, position, SharedMemory(), &state);
  WriteResults<C>(state, span, item, params.group, params.partials, position, SharedMemory());
}

template <class C>
int LaunchAttend(const AttendParams& params, int32_t count, void* stream) {
  const auto kernel = AttendKernel<C>;
  if (C::kSharedBytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (error != cudaSuccess) return error;
  }
  return LaunchKernel(kernel, dim3(count), C::kThreads, C::kSharedBytes, stream, params);
}

template <class Element, int kHeadDim>
int AttendRows(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream) {
  switch (tile_rows) {
    case 16:
      return LaunchAttend<Config<Element, kHeadDim, 16>>(params, count, stream);
    case 32:
      return LaunchAttend<Config<Element, kHeadDim, 32>>(params, count, stream);
    case 64:
      return LaunchAttend<Config<Element, kHeadDim, 64>>(params, count, stream);
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim>
int Attend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count,
           void* stream) {
  return dtype == DType::kFloat16
             ? AttendRows<__half, kHeadDim>(tile_rows, params, count, stream)
             : AttendRows<__nv_bfloat16, kHeadDim>(tile_rows, params, count, stream);
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
