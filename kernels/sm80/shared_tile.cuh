// Tiles of Q, K and V in shared memory: rows of head_dim elements in chunks of 16 bytes. The order
// of a row's chunks is XORed with bits of the row number, so that the same chunk of 8 consecutive
// rows, which is what ldmatrix reads at a time, lies in 8 different groups of 4 banks.
#ifndef FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
#define FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/ptx.cuh"

namespace flashcore::kernels::sm80 {

// Chunks whose order is permuted among themselves: XOR leaves higher bits of a chunk's number
// alone. A row of 64 * n elements is whole cycles of the 32 banks; a row of 32 * n is half a cycle
// more or less, so neighbours differ already and pairs of rows must.
template <int kHeadDim>
constexpr int kChunkCycle = kHeadDim % 64 == 0 ? 8 : 4;

// Byte offset of chunk `cycle * kChunkCycle + chunk` of a row. Where the cycle is known at compile
// time it becomes part of the instruction, so that a thread needs few addresses for many chunks.
template <int kHeadDim>
__device__ __forceinline__ int ChunkOffset(int row, int cycle, int chunk) {
  constexpr int kCycle = kChunkCycle<kHeadDim>;
  const int swizzle = kCycle == 8 ? row % 8 : row / 2 % 4;
  return row * (kHeadDim * 2) + cycle * (kCycle * 16) + (chunk ^ swizzle) * 16;
}

// The same for chunk 2 * step + odd.
template <int kHeadDim>
__device__ __forceinline__ int StepOffset(int row, int step, int odd) {
  constexpr int kSteps = kChunkCycle<kHeadDim> / 2;
  return ChunkOffset<kHeadDim>(row, step / kSteps, step % kSteps * 2 + odd);
}

// Starts copying a K or V tile of 64 rows, row_stride bytes apart, of which only the first `tokens`
// exist; the others become zeros, so that what their memory holds (NaN, say) never meets a
// probability of 0.
template <class C>
__device__ __forceinline__ void CopyTileAsync(const std::byte* from, int64_t row_stride, int tokens,
                                              std::byte* to) {
  constexpr int kCycle = kChunkCycle<C::kHeadDim>;
  constexpr int kRowsAtOnce = C::kThreads / kCycle;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % kCycle;
  from += thread / kCycle * row_stride + chunk * 16;
#pragma unroll
  for (int row = thread / kCycle; row < thread / kCycle + kPageTokens; row += kRowsAtOnce) {
#pragma unroll
    for (int cycle = 0; cycle < C::kHeadDim / 8 / kCycle; ++cycle) {
      CopyAsync16(to + ChunkOffset<C::kHeadDim>(row, cycle, chunk), from + cycle * kCycle * 16,
                  row < tokens);
    }
    from += kRowsAtOnce * row_stride;
  }
}

// Starts copying the packed query rows of an item; the tile's other rows become zeros.
template <class C>
__device__ __forceinline__ void CopyQueryAsync(const Span& span, const WorkItem& item,
                                               int32_t group, std::byte* to) {
  constexpr int kChunks = C::kHeadDim / 8;
  for (int index = threadIdx.x; index < C::kRows * kChunks; index += C::kThreads) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool exists = row < item.row_count;
    const int32_t packed_row = item.row_begin + (exists ? row : 0);
    const int64_t head = int64_t{item.kv_head} * group + packed_row % group;
    const std::byte* from =
        span.query + packed_row / group * span.row_stride + head * span.head_stride;
    CopyAsync16(to + StepOffset<C::kHeadDim>(row, chunk / 2, chunk % 2), from + chunk * 16, exists);
  }
}

// The operands of MultiplyAdd, by ldmatrix. Q rows [row, row + 16), components [16 * step, + 16).
template <int kHeadDim>
__device__ __forceinline__ void LoadQuery(const std::byte* tile, int row, int step, int lane,
                                          uint32_t (&query)[4]) {
  LoadMatrices(tile + StepOffset<kHeadDim>(row + lane % 16, step, lane / 16), query);
}

// K of tokens [token, token + 16), components [16 * step, + 16): key[0], key[1] are the operand of
// the first 8 tokens, key[2], key[3] that of the others.
template <int kHeadDim>
__device__ __forceinline__ void LoadKeys(const std::byte* tile, int token, int step, int lane,
                                         uint32_t (&key)[4]) {
  const int row = token + lane / 16 * 8 + lane % 8;
  LoadMatrices(tile + StepOffset<kHeadDim>(row, step, lane / 8 % 2), key);
}

// V of tokens [token, token + 16), components [16 * step, + 16): value[0], value[1] are the operand
// of the first 8 components, value[2], value[3] that of the others.
template <int kHeadDim>
__device__ __forceinline__ void LoadValues(const std::byte* tile, int token, int step, int lane,
                                           uint32_t (&value)[4]) {
  LoadMatricesTransposed(tile + StepOffset<kHeadDim>(token + lane % 16, step, lane / 16), value);
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
