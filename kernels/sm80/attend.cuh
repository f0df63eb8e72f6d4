// Fused attention on mma.sync.m16n8k16: the kernel and its launch.
//
// A block attends one work tile of packed query rows to a range of K/V. Scores and probabilities
// stay in the registers of the warp that computed them. O is rescaled when the row max grows
// (online softmax) and divided by the row sum at the end. The parts: mainloop.cuh copies K/V tiles
// and multiplies (operands.cuh), mask.cuh and softmax.cuh process the scores, epilogue.cuh reduces
// across warps and writes the results.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_CUH_
#define FLASHCORE_KERNELS_SM80_ATTEND_CUH_

#include <cstddef>
#include <type_traits>

#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/smxx/combine.cuh"
#include "kernels/smxx/launch.cuh"

namespace flashcore::kernels::sm80 {

template <class C, size_t kListBytes>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    AttendKernel(const __grid_constant__ LaunchArguments<kListBytes> arguments) {
  const LaunchParams& params = arguments.params;
  const Work work = arguments.WorkAt(blockIdx.y);
  const SoftmaxScale scale(ScoreScale<C>(work));
  State<C> state;
  RunMainloop<C>(work, params.group, params.partials, scale, &state);
  const int kv_head = KvHead();
  WriteResults<C>(scale, work, kv_head, params.group, params.partials, state);
  if constexpr (C::kCombines) {
    if (work.tile.num_parts > 1 &&
        IsLastPart(work.tile.num_parts, &params.finished[work.tile.combine + kv_head])) {
      CombineParts<typename C::Element>(work, kv_head, params.group, params.partials, 0,
                                        work.tile.row_count, threadIdx.x, C::kThreads);
    }
  }
}

template <class C>
int LaunchConfig(const LaunchTiles& tiles) {
  // A launch with runs takes long. It can do without the time that a small list saves.
  constexpr size_t kLeastBytes = C::kRuns ? kMaxListInParameters : kSmallListBytes;
  return ForListSize<kLeastBytes>(tiles, [&](auto list_bytes) {
    return LaunchWithList(AttendKernel<C, decltype(list_bytes)::value>, tiles, 1, C::kThreads,
                          C::kSharedBytes);
  });
}

// Launches the kernel for tiles of tile_rows packed rows, at most kMaxRows.
template <int kMaxRows, class Element, int kHeadDim, class Accum, class KvElement>
int LaunchTileRows(int32_t tile_rows, const LaunchTiles& tiles) {
  const auto launch = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    using Split = Config<Element, kHeadDim, kRows, Accum, KvElement>;
    [[maybe_unused]] const BlockUse use =
        Sm80UseFor(Split::kBlock, tiles.has_runs, tiles.block_shared_bytes);
    if constexpr (Split::kMayHaveRuns) {
      using Run = Config<Element, kHeadDim, kRows, Accum, KvElement, BlockUse::kRun>;
      if (use == BlockUse::kRun) return LaunchConfig<Run>(tiles);
    }
    if constexpr (Split::kStashes) {
      using Small = Config<Element, kHeadDim, kRows, Accum, KvElement, BlockUse::kSmallShared>;
      if (use == BlockUse::kSmallShared) return LaunchConfig<Small>(tiles);
    }
    return LaunchConfig<Split>(tiles);
  };
  switch (tile_rows) {
    case 16:
      return launch(std::integral_constant<int, 16>());
    case 32:
      return launch(std::integral_constant<int, 32>());
    case 64:
      return launch(std::integral_constant<int, 64>());
    case 128:
      if constexpr (kMaxRows >= 128) return launch(std::integral_constant<int, 128>());
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim, Accumulate kAccumulate, KvDType kKvDType>
int LaunchAttend(DType dtype, int32_t tile_rows, const LaunchTiles& tiles) {
  constexpr bool kFp8 = kKvDType == KvDType::kFloat8E4M3;
  constexpr bool kFloat16Sums = kAccumulate == Accumulate::kFloat16;
  constexpr int kMaxRows = (kFp8 ? Sm80Fp8Plan(kHeadDim) : Sm80Plan(kHeadDim)).tile_rows;
  if (dtype == DType::kFloat16) {
    using Accum = std::conditional_t<kFloat16Sums, __half, float>;
    using KvElement = std::conditional_t<kFp8, __nv_fp8_e4m3, __half>;
    return LaunchTileRows<kMaxRows, __half, kHeadDim, Accum, KvElement>(tile_rows, tiles);
  }
  if constexpr (!kFp8 && !kFloat16Sums) {
    return LaunchTileRows<kMaxRows, __nv_bfloat16, kHeadDim, float, __nv_bfloat16>(tile_rows,
                                                                                   tiles);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
