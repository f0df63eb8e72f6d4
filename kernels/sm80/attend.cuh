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
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/sm80/attend.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/mainloop.cuh"
#include "kernels/smxx/combine.cuh"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::kernels::sm80 {

// The parameters of a launch: those of all its blocks, then kListBytes for the work list.
template <size_t kListBytes>
struct AttendArguments {
  explicit AttendArguments(const AttendParams& of_all) : params(of_all) {}

  AttendParams params;
  alignas(16) std::byte list[kListBytes];
};
template <>
struct AttendArguments<0> {
  explicit AttendArguments(const AttendParams& of_all) : params(of_all) {}

  AttendParams params;
};

template <class C, size_t kListBytes>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    AttendKernel(const __grid_constant__ AttendArguments<kListBytes> arguments) {
  const AttendParams& params = arguments.params;
  const WorkSpan* spans = params.spans;
  const WorkTile* tiles = params.tiles;
  if constexpr (kListBytes > 0) {
    spans = reinterpret_cast<const WorkSpan*>(arguments.list);
    tiles = reinterpret_cast<const WorkTile*>(spans + params.num_spans);
  }
  // By reference: fields that only the epilogue needs take no registers in the main loop.
  const WorkTile& tile = tiles[blockIdx.y];
  const Work work = {spans, tile, spans[tile.span], kListBytes > 0};
  const int kv_head = blockIdx.x;
  const SoftmaxScale scale(ScoreScale<C>(work, kv_head));
  State<C> state;
  RunMainloop<C>(work, kv_head, params.group, scale, SharedMemory(), &state);
  WriteResults<C>(scale, work, kv_head, params.group, params.partials, ThreadPosition<C>(),
                  SharedMemory(), state);
  if (tile.num_splits > 1 &&
      IsLastSplit(tile.num_splits, &params.finished[tile.combine + kv_head])) {
    CombineSplits<typename C::Element, C::kThreads>(work, kv_head, params.group, params.partials);
  }
}

// Work lists in parameters have one of these sizes: few bytes take less of the host's time.
inline constexpr size_t kSmallListBytes = 3968;  // all parameters take at most 4 KB

template <class C, size_t kListBytes>
int LaunchConfig(const AttendParams& params, int32_t count, void* stream) {
  const auto kernel = AttendKernel<C, kListBytes>;
  if (C::kSharedBytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (error != cudaSuccess) return error;
  }
  AttendArguments<kListBytes> arguments(params);
  if constexpr (kListBytes > 0) {
    const size_t span_bytes = params.num_spans * sizeof(WorkSpan);
    memcpy(arguments.list, params.spans, span_bytes);
    memcpy(arguments.list + span_bytes, params.tiles, count * sizeof(WorkTile));
  }
  constexpr int32_t kMaxGridY = 65535;
  for (; count > 0; count -= kMaxGridY, arguments.params.tiles += kMaxGridY) {
    const dim3 grid(params.num_kv_heads, std::min(count, kMaxGridY));
    const cudaError_t error =
        LaunchKernel(kernel, grid, C::kThreads, C::kSharedBytes, stream, arguments);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class C>
int LaunchList(const AttendParams& params, int32_t count, bool in_parameters, void* stream) {
  if (!in_parameters) return LaunchConfig<C, 0>(params, count, stream);
  const size_t bytes = params.num_spans * sizeof(WorkSpan) + count * sizeof(WorkTile);
  if (bytes <= kSmallListBytes) return LaunchConfig<C, kSmallListBytes>(params, count, stream);
  return LaunchConfig<C, kMaxListInParameters>(params, count, stream);
}

// Launches the kernel for tiles of tile_rows packed rows, at most kMaxRows.
template <int kMaxRows, class Element, int kHeadDim, class Accum, class KvElement>
int LaunchTileRows(int32_t tile_rows, const AttendParams& params, int32_t count, bool in_parameters,
                   void* stream) {
  const auto launch = [&](auto rows) {
    return LaunchList<Config<Element, kHeadDim, decltype(rows)::value, Accum, KvElement>>(
        params, count, in_parameters, stream);
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
int LaunchAttend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count,
                 bool in_parameters, void* stream) {
  constexpr bool kFp8 = kKvDType == KvDType::kFloat8E4M3;
  constexpr bool kFloat16Sums = kAccumulate == Accumulate::kFloat16;
  constexpr int kMaxRows = (kFp8 ? Sm80Fp8Plan(kHeadDim) : Sm80Plan(kHeadDim)).tile_rows;
  if (dtype == DType::kFloat16) {
    using Accum = std::conditional_t<kFloat16Sums, __half, float>;
    using KvElement = std::conditional_t<kFp8, __nv_fp8_e4m3, __half>;
    return LaunchTileRows<kMaxRows, __half, kHeadDim, Accum, KvElement>(tile_rows, params, count,
                                                                        in_parameters, stream);
  }
  if constexpr (!kFp8 && !kFloat16Sums) {
    return LaunchTileRows<kMaxRows, __nv_bfloat16, kHeadDim, float, __nv_bfloat16>(
        tile_rows, params, count, in_parameters, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_CUH_
