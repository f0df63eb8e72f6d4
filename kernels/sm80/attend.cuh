// Fused attention on mma.sync.m16n8k16: the kernel and its launch.
//
// A block attends one work tile of packed query rows to a range of K/V. Scores and probabilities
// stay in the registers of the warp that computed them. O is rescaled when the row max grows
// (online softmax) and divided by the row sum at the end. The parts: mainloop.cuh copies K/V tiles
// and multiplies (operands.cuh), mask.cuh and softmax.cuh process the scores, epilogue.cuh reduces
// across warps and writes the results.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_CUH_
#define FLASHCORE_KERNELS_SM80_ATTEND_CUH_

#include <algorithm>
#include <type_traits>

#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/smxx/combine.cuh"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::kernels::sm80 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    AttendKernel(const AttendParams params) {
  // By reference: fields that only the epilogue needs take no registers in the main loop.
  const WorkTile& work = params.work[blockIdx.y];
  const int kv_head = blockIdx.x;
  const ThreadPosition<C> thread;
  const SoftmaxScale scale(ScoreScale<C>(work, kv_head));
  State<C> state;
  RunMainloop<C>(work, kv_head, params.group, scale, thread, SharedMemory(), &state);
  WriteResults<C>(scale, work, kv_head, params.group, params.partials, thread, SharedMemory(),
                  state);
  if (work.num_splits > 1 &&
      IsLastSplit(work.num_splits, &params.finished[work.combine + kv_head])) {
    CombineSplits<typename C::Element, C::kThreads>(work, kv_head, params.group, params.partials);
  }
}

template <class C>
int LaunchConfig(AttendParams params, int32_t count, void* stream) {
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

// Launches the kernel for tiles of tile_rows packed rows, at most kMaxRows.
template <int kMaxRows, class Element, int kHeadDim, class Accum, class KvElement>
int LaunchTileRows(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream) {
  switch (tile_rows) {
    case 16:
      return LaunchConfig<Config<Element, kHeadDim, 16, Accum, KvElement>>(params, count, stream);
    case 32:
      return LaunchConfig<Config<Element, kHeadDim, 32, Accum, KvElement>>(params, count, stream);
    case 64:
      return LaunchConfig<Config<Element, kHeadDim, 64, Accum, KvElement>>(params, count, stream);
    case 128:
      if constexpr (kMaxRows >= 128) {
        return LaunchConfig<Config<Element, kHeadDim, 128, Accum, KvElement>>(params, count,
                                                                              stream);
      }
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim, Accumulate kAccumulate, KvDType kKvDType>
int LaunchAttend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count,
                 void* stream) {
  constexpr bool kFp8 = kKvDType == KvDType::kFloat8E4M3;
  constexpr bool kFloat16Sums = kAccumulate == Accumulate::kFloat16;
  constexpr int kMaxRows = (kFp8 ? Sm80Fp8Plan(kHeadDim) : Sm80Plan(kHeadDim)).tile_rows;
  if (dtype == DType::kFloat16) {
    using Accum = std::conditional_t<kFloat16Sums, __half, float>;
    using KvElement = std::conditional_t<kFp8, __nv_fp8_e4m3, __half>;
    return LaunchTileRows<kMaxRows, __half, kHeadDim, Accum, KvElement>(tile_rows, params, count,
                                                                        stream);
  }
  if constexpr (!kFp8 && !kFloat16Sums) {
    return LaunchTileRows<kMaxRows, __nv_bfloat16, kHeadDim, float, __nv_bfloat16>(
        tile_rows, params, count, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
