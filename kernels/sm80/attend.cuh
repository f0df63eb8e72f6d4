// Fused attention on mma.sync.m16n8k16, with float32 or float16 sums: the kernel and its launch.
//
// A block attends one work item: a tile of packed query rows to a range of K/V. Scores and
// probabilities never leave the registers of the warp that computed them; O is rescaled as larger
// scores turn up (online softmax) and divided by its sum at the end. The roles: mainloop.cuh copies
// tiles in and multiplies (operands.cuh), mask.cuh and softmax.cuh work on the scores in between,
// epilogue.cuh merges warps and writes.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_CUH_
#define FLASHCORE_KERNELS_SM80_ATTEND_CUH_

#include <algorithm>

#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/smxx/combine.cuh"
#include "kernels/smxx/launch.cuh"

namespace flashcore::kernels::sm80 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    AttendKernel(const AttendParams params) {
  // By reference: what the epilogue needs of it is read then, and takes no registers before.
  const WorkTile& work = params.work[blockIdx.y];
  const int kv_head = blockIdx.x;
  const Position<C> position;
  const SoftmaxScale scale(ScoreScale<C>(work, kv_head));
  State<C> state;
  AttendTiles<C>(work, kv_head, params.group, scale, position, SharedMemory(), &state);
  WriteResults<C>(scale, work, kv_head, params.group, params.partials, position, SharedMemory(),
                  state);
  if (work.num_splits > 1 &&
      IsLastSplit(work.num_splits, &params.finished[work.combine + kv_head])) {
    CombineSplits<typename C::Element, C::kThreads>(work, kv_head, params.group, params.partials);
  }
}

template <class C>
int LaunchAttend(AttendParams params, int32_t count, void* stream) {
  const auto kernel = AttendKernel<C>;
  if (C::kSharedBytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (error != cudaSuccess) return error;
  }
  constexpr int32_t kMaxGridY = 65535;
  for (; count > 0; count -= kMaxGridY, params.work += kMaxGridY) {
    const dim3 grid(params.num_kv_heads, std::min(count, kMaxGridY));
    const cudaError_t error =
        LaunchKernel(kernel, grid, C::kThreads, C::kSharedBytes, stream, params);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Sum as in Config; kMaxRows: of a tile, as the plan has it.
template <class Element, class Sum, int kHeadDim, int kMaxRows, class KvElement = Element>
int AttendRows(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream) {
  switch (tile_rows) {
    case 16:
      return LaunchAttend<Config<Element, kHeadDim, 16, Sum, KvElement>>(params, count, stream);
    case 32:
      return LaunchAttend<Config<Element, kHeadDim, 32, Sum, KvElement>>(params, count, stream);
    case 64:
      return LaunchAttend<Config<Element, kHeadDim, 64, Sum, KvElement>>(params, count, stream);
    case 128:
      if constexpr (kMaxRows >= 128) {
        return LaunchAttend<Config<Element, kHeadDim, 128, Sum, KvElement>>(params, count, stream);
      }
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim>
int Attend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count,
           void* stream) {
  constexpr int kMaxRows = TileFor(kSm80Tiles, kHeadDim).plan.tile_rows;
  return dtype == DType::kFloat16
             ? AttendRows<__half, float, kHeadDim, kMaxRows>(tile_rows, params, count, stream)
             : AttendRows<__nv_bfloat16, float, kHeadDim, kMaxRows>(tile_rows, params, count,
                                                                    stream);
}

template <int kHeadDim>
int AttendFloat16(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream) {
  constexpr int kMaxRows = TileFor(kSm80Tiles, kHeadDim).plan.tile_rows;
  return AttendRows<__half, __half, kHeadDim, kMaxRows>(tile_rows, params, count, stream);
}

template <int kHeadDim>
int AttendFp8(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream) {
  constexpr int kMaxRows = TileFor(kSm80Fp8Tiles, kHeadDim).plan.tile_rows;
  return AttendRows<__half, float, kHeadDim, kMaxRows, __nv_fp8_e4m3>(tile_rows, params, count,
                                                                      stream);
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
