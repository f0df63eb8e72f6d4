// Fused attention on mma.sync.m16n8k16: the kernel and its launch.
//
// A block attends one work tile of packed query rows to a range of K/V. Scores and probabilities
// stay in the registers of the warp that computed them. O is rescaled when the row max grows
// (online softmax) and divided by the row sum at the end. The parts: mainloop.cuh loops over
// K/V tiles, which kv_ring.cuh or kv_buffers.cuh copies; scores.cuh has Q K^T and what follows for
// each score, softmax.cuh the probabilities, values.cuh P V; epilogue.cuh reduces across warps and
// writes the results.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_CUH_
#define FLASHCORE_KERNELS_SM80_ATTEND_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cuda/combine.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/sm80/thread.cuh"
#include "kernels/sm80/tiles.h"

namespace flashcore::kernels::sm80 {

// The block's work item, with its tile where the main loop reads it.
template <class C>
__device__ __forceinline__ Work WorkToRead(const Work& work) {
  if constexpr (!C::kPacksQuery) return work;
  constexpr int kWords = sizeof(WorkTile) / 4;
  static_assert(kWords <= C::kThreads && C::kWorkTileOffset % alignof(WorkTile) == 0);
  std::byte* const tile = SharedMemory() + C::kWorkTileOffset;
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint32_t*>(tile)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&work.tile)[threadIdx.x];
  }
  __syncthreads();
  return {*reinterpret_cast<const WorkTile*>(tile), work.span};
}

template <class C, size_t kListBytes>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    AttendKernel(const __grid_constant__ LaunchArguments<kListBytes> arguments) {
  const LaunchParams& params = arguments.params;
  const Work work = WorkToRead<C>(arguments.WorkAt(blockIdx.y));
  const SoftmaxScale scale = ScoreScale<C>(work);
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

// The kernels of a row of the registry.
template <Arch kArch, DType kDType, int kHeadDim, Accumulate kAccumulate, KvDType kKvDType,
          Precision kPrecision>
struct RowKernels {
  using Element = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  using Accum = std::conditional_t<kAccumulate == Accumulate::kFloat16, __half, float>;
  using Code = std::conditional_t<kKvDType == KvDType::kFloat8E4M3, __nv_fp8_e4m3, int8_t>;
  using KvElement = std::conditional_t<Is8Bit(kKvDType), Code, Element>;
  template <int kRows, Arch kBlockArch, Items kItems, Precision kOfBlock>
  using ConfigOf = Config<Element, kHeadDim, kRows, Accum, KvElement, kBlockArch, kItems, kOfBlock>;

  static constexpr PlanOptions kPlan = PlanFor(kHeadDim, kArch, kKvDType, kPrecision);

  // For tiles of up to kRows packed rows.
  template <int kRows>
  static int Launch(const LaunchTiles& tiles) {
    constexpr int32_t kSmallest = KernelRows(kRows, 1, kKvDType);
    if constexpr (kSmallest != kRows) {
      if (KernelRows(kRows, tiles.most_rows, kKvDType) == kSmallest)
        return Launch<kSmallest>(tiles);
    }
    if constexpr (kRows > kPlan.tile_rows) {
      return cudaErrorInvalidValue;  // no plan has them
    } else {
      constexpr bool kSmall = kRows <= kSmallSpanRows;
      // Small ones are bound by memory: less precise products would gain nothing.
      constexpr Precision kOfBlock = kSmall ? Precision::k16Bit : kPrecision;
      constexpr bool kMayRun =
          kSmall ? kPlan.has_small_runs : kPlan.has_runs && kRows == kPlan.tile_rows;
      if constexpr (kMayRun) {
        constexpr Arch kBlockArch = BlockArch(kRows, kHeadDim, kArch, kKvDType, kOfBlock, kSmall);
        if (tiles.has_runs)
          return LaunchConfig<ConfigOf<kRows, kBlockArch, Items::kRuns, kOfBlock>>(tiles);
      }
      constexpr Arch kBlockArch =
          BlockArch(kRows, kHeadDim, kArch, kKvDType, kOfBlock, /*small_runs=*/false);
      return LaunchConfig<ConfigOf<kRows, kBlockArch, Items::kSplits, kOfBlock>>(tiles);
    }
  }

  static int LaunchCascades(const LaunchTiles& tiles) {
    return LaunchConfig<
        ConfigOf<kCudaCascadeRows, Arch::kLargeShared, Items::kCascades, Precision::k16Bit>>(tiles);
  }

  static constexpr CudaKernels kAll = {
      {Launch<TileRows(0)>, Launch<TileRows(1)>, Launch<TileRows(2)>, Launch<TileRows(3)>},
      LaunchCascades};
};

template <Arch kArch, DType kDType, int kHeadDim, Accumulate kAccumulate, KvDType kKvDType,
          Precision kPrecision>
int Attend(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  return LaunchAttention(
      RowKernels<kArch, kDType, kHeadDim, kAccumulate, kKvDType, kPrecision>::kAll, batch, plan,
      ctx);
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
