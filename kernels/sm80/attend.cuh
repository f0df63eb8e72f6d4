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
#include <utility>

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
  Outcome<C> outcome;
  RunMainloop<C>(work, params.group, params.partials, scale, &outcome);
  const int kv_head = KvHead();
  if constexpr (C::kCascades) {
    WriteCascade<C>(scale, work, kv_head, params.partials, outcome);
  } else {
    WriteResults<C>(scale, work, kv_head, params.group, params.partials, outcome);
  }
  if constexpr (C::kCombines) {
    if (work.tile.num_parts > 1 && work.tile.combine >= 0 &&
        IsLastPart(work.tile.num_parts, &params.finished[work.tile.combine + kv_head])) {
      using RunParts = std::conditional_t<C::kRuns, std::integer_sequence<int, kSmallRunSplits, 1>,
                                          std::integer_sequence<int, kSmallRunSplits>>;
      CombineParts<typename C::Element>(RunParts(), work, kv_head, params.group, params.partials, 0,
                                        work.tile.row_count, threadIdx.x, C::kThreads);
    }
  }
}

template <class C>
int LaunchConfig(const LaunchTiles& tiles) {
  // A launch with runs takes long, and one of cascade items has many records. They can do without
  // the time that a small list saves.
  constexpr size_t kLeastBytes = C::kRuns || C::kCascades ? kMaxListInParameters : kSmallListBytes;
  return ForListSize<kLeastBytes>(tiles, [&](auto list_bytes) {
    return LaunchWithList(AttendKernel<C, decltype(list_bytes)::value>, tiles, 1, C::kThreads,
                          C::kSharedBytes);
  });
}

// Launches the kernel for tiles of tile_rows packed rows, or for cascade items, on a device with
// kShared.
template <class Element, int kHeadDim, class Accum, class KvElement, SharedSize kShared>
int LaunchTileRows(int32_t tile_rows, const LaunchTiles& tiles) {
  constexpr bool kFp8 = sizeof(KvElement) == 1;
  constexpr PlanOptions kPlan = kFp8 ? Sm80Fp8Plan(kHeadDim, kShared) : Sm80Plan(kHeadDim, kShared);
  constexpr int32_t kLargestRows = kPlan.tile_rows;
  constexpr int32_t kRunRows = kPlan.has_runs ? kLargestRows : 0;
  constexpr bool kHasSmallRuns = kPlan.has_small_runs;
  const auto launch = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    constexpr SharedSize kFor = Sm80BlockOf(kRows, kHeadDim, kShared);
    using Split = Config<Element, kHeadDim, kRows, Accum, KvElement, kFor>;
    if constexpr (kRows == kCudaTileRows[0] ? kHasSmallRuns : kRows == kRunRows) {
      using Run = Config<Element, kHeadDim, kRows, Accum, KvElement, kFor, Items::kRuns>;
      if (tiles.has_runs) return LaunchConfig<Run>(tiles);
    }
    return LaunchConfig<Split>(tiles);
  };
  if (tiles.members > 0) {
    return LaunchConfig<Config<Element, kHeadDim, kCudaCascadeRows, Accum, KvElement,
                               SharedSize::kLarge, Items::kCascades>>(tiles);
  }
  switch (tile_rows) {
    case 16:
      return launch(std::integral_constant<int, 16>());
    case 32:
      return launch(std::integral_constant<int, 32>());
    case 64:
      return launch(std::integral_constant<int, 64>());
    case 128:
      if constexpr (kLargestRows >= 128) return launch(std::integral_constant<int, 128>());
  }
  return cudaErrorInvalidValue;
}

template <int kHeadDim, Accumulate kAccumulate, KvDType kKvDType>
int LaunchAttend(DType dtype, int32_t tile_rows, const LaunchTiles& tiles) {
  constexpr bool kFp8 = kKvDType == KvDType::kFloat8E4M3;
  constexpr bool kFloat16Sums = kAccumulate == Accumulate::kFloat16;
  const auto launch = [&](auto shared) {
    constexpr SharedSize kShared = decltype(shared)::value;
    if (dtype == DType::kFloat16) {
      using Accum = std::conditional_t<kFloat16Sums, __half, float>;
      using KvElement = std::conditional_t<kFp8, __nv_fp8_e4m3, __half>;
      return LaunchTileRows<__half, kHeadDim, Accum, KvElement, kShared>(tile_rows, tiles);
    }
    if constexpr (!kFp8 && !kFloat16Sums) {
      return LaunchTileRows<__nv_bfloat16, kHeadDim, float, __nv_bfloat16, kShared>(tile_rows,
                                                                                    tiles);
    }
    return static_cast<int>(cudaErrorInvalidValue);
  };
  using Large = std::integral_constant<SharedSize, SharedSize::kLarge>;
  using Small = std::integral_constant<SharedSize, SharedSize::kSmall>;
  return tiles.shared == SharedSize::kLarge ? launch(Large()) : launch(Small());
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
