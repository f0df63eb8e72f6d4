// Tiles of Q, K and V in shared memory: rows of kRowBytes bytes in chunks of 16. A swizzle XORs the
// chunk's index with bits of the row number, so that ldmatrix, which reads the same chunk of 8
// consecutive rows at a time, has no bank conflicts: the 8 chunks are in 8 different groups of 4
// banks.
#ifndef FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
#define FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// The swizzle permutes chunks within aligned cycles of this many. A row of 128 * n bytes ends at a
// multiple of the 32 banks. A row of 64 * n bytes ends half way: odd rows are shifted by 16 banks,
// so the swizzle changes with every second row.
template <int kRowBytes>
constexpr int kChunkCycle = kRowBytes % 128 == 0 ? 8 : 4;

// Byte offset in the tile of chunk `cycle * kChunkCycle + chunk` of a row.
template <int kRowBytes>
__device__ __forceinline__ constexpr int ChunkOffset(int row, int cycle, int chunk) {
  constexpr int kCycle = kChunkCycle<kRowBytes>;
  const int swizzle = kCycle == 8 ? row % 8 : row / 2 % 4;
  return row * kRowBytes + cycle * (kCycle * 16) + (chunk ^ swizzle) * 16;
}

// Byte offset in the tile of chunk 2 * step + odd of a row.
template <int kRowBytes>
__device__ __forceinline__ constexpr int StepOffset(int row, int step, int odd) {
  constexpr int kSteps = kChunkCycle<kRowBytes> / 2;
  return ChunkOffset<kRowBytes>(row, step / kSteps, step % kSteps * 2 + odd);
}

// Address of chunk 2 * step + odd of a row, given that of chunk `odd`. Rows start at multiples of a
// cycle, so the step's bits of the address are independent of the others.
template <int kRowBytes>
__device__ __forceinline__ uint32_t StepAddress(uint32_t first, int step) {
  constexpr int kSteps = kChunkCycle<kRowBytes> / 2;
  return (first ^ (step % kSteps * 32)) + step / kSteps * (kChunkCycle<kRowBytes> * 16);
}

// Address in the row 16 * n rows later. The swizzle is the same there.
template <int kRowBytes>
__device__ __forceinline__ uint32_t RowAddress(uint32_t address, int n) {
  return address + n * 16 * kRowBytes;
}

// One thread's part of copying a K or V tile of its KV warp group.
template <class C>
struct TileCopy {
  static constexpr int kCycle = kChunkCycle<C::kKvRowBytes>;
  static constexpr int kRowsAtOnce = C::kGroupThreads / kCycle;
  static constexpr int kSwizzledRows = 8;  // rows after which the swizzle repeats
  static_assert(kRowsAtOnce % kSwizzledRows == 0 || (kRowsAtOnce == 4 && kCycle == 8));

  // The thread's first row of a tile, and its chunk in a cycle.
  __device__ __forceinline__ TileCopy() {
    const int thread = ThreadIndex<C>() % C::kGroupThreads;
    first_row = thread / kCycle;
    chunk = thread % kCycle;
  }

  // Bytes from the start of a tile in global memory to the thread's first chunk.
  __device__ __forceinline__ int64_t Offset(int64_t row_stride) const {
    return first_row * row_stride + chunk * 16;
  }

  // Starts copying a tile of kTileTokens rows. `from` is the thread's first chunk in global memory,
  // `to` the tile's shared address. Only the first `tokens` rows exist: the others are not read and
  // become zeros, because a probability of 0 times a NaN there would be NaN.
  __device__ __forceinline__ void CopyAsync(const std::byte* from, int64_t row_stride, int tokens,
                                            uint32_t to) const {
    to += ChunkOffset<C::kKvRowBytes>(first_row, 0, chunk);
    tokens -= first_row;
#pragma unroll
    for (int row = 0; row < C::kTileTokens; row += kRowsAtOnce) {
      if (C::kTileTokens % kRowsAtOnce != 0 && first_row + row >= C::kTileTokens) break;
      // 4 rows later, the highest bit of the swizzle differs.
      const uint32_t to_row = (row % kSwizzledRows == 0 ? to : to ^ 64) + row * C::kKvRowBytes;
#pragma unroll
      for (int cycle = 0; cycle < C::kKvRowBytes / 16 / kCycle; ++cycle) {
        CopyChunk(to_row + cycle * kCycle * 16, from + cycle * kCycle * 16, row < tokens);
      }
      from += kRowsAtOnce * row_stride;
    }
  }

  // Starts copying the scales of a tile's rows, those of K and then those of V: kTileTokens each, a
  // part for each of the group's first threads. Those of rows that do not exist are read with
  // others.
  static __device__ __forceinline__ void CopyScalesAsync(const std::byte* key_scales,
                                                         const std::byte* value_scales, int tokens,
                                                         uint32_t to) {
    constexpr int kChunks = C::kScaleBytes / 2 / 16;  // of K, and of V
    const int thread = ThreadIndex<C>() % C::kGroupThreads;
    if (thread >= 2 * kChunks) return;
    const int chunk = thread % kChunks;
    const std::byte* from = (thread < kChunks ? key_scales : value_scales) + chunk * 16;
    CopyChunk(to + thread * 16, from, chunk * 8 < tokens);
  }

  // K/V of many runs phases through L2, which should keep their sums.
  static __device__ __forceinline__ void CopyChunk(uint32_t to, const std::byte* from, bool valid) {
    if constexpr (C::kAddsSplits) {
      CopyAsync16EvictFirst(to, from, valid);
    } else {
      CopyAsync16(to, from, valid);
    }
  }

  int first_row;
  int chunk;
};

// Starts copying the work item's packed query rows; the rows beyond row_count become zeros.
template <class C>
__device__ __forceinline__ void CopyQueryAsync(const Work& work, int kv_head, RowDivider group,
                                               uint32_t to) {
  constexpr int kChunks = C::kQueryRowBytes / 16;
  int member_rows = 0;
  if constexpr (C::kCascades) member_rows = work.tile.row_count / work.tile.num_members;
#pragma unroll
  for (int begin = 0; begin < C::kRows * kChunks; begin += C::kThreads) {
    const int index = begin + static_cast<int>(threadIdx.x);
    if (C::kRows * kChunks % C::kThreads != 0 && index >= C::kRows * kChunks) break;
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool exists = row < work.tile.row_count;
    const auto from_row = [&](const WorkSpan& span, int32_t packed_row) {
      const int32_t query_row = group.Divide(packed_row);
      return span.query + kv_head * span.group_stride + query_row * span.row_stride +
             (packed_row - query_row * group.divisor) * span.head_stride;
    };
    const std::byte* from;
    if constexpr (C::kCascades) {
      const int member = exists ? row / member_rows : 0;
      from = from_row(work.Member(member).span, exists ? row - member * member_rows : 0);
    } else {
      from = from_row(work.span, work.tile.row_begin + (exists ? row : 0));
    }
    CopyAsync16(to + StepOffset<C::kQueryRowBytes>(row, chunk / 2, chunk % 2), from + chunk * 16,
                exists);
  }
}

// Replaces the Q tile in shared memory by -Q.
template <class C>
__device__ __forceinline__ void NegateQuery(std::byte* tile) {
  auto* const pairs = reinterpret_cast<uint32_t*>(tile);
  for (int n = threadIdx.x; n < C::kQueryBytes / 4; n += C::kThreads) pairs[n] ^= 0x80008000u;
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
