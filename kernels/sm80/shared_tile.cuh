// Tiles of Q, K and V in shared memory: rows of head_dim elements in chunks of 16 bytes. The order
// of a row's chunks is XORed with bits of the row number, so that the same chunk of 8 consecutive
// rows, which is what ldmatrix reads at a time, lies in 8 different groups of 4 banks. A row of
// E4M3 codes is laid out as one of half as many elements: kHeadDim is Config::kKvWidth then.
#ifndef FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
#define FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/ptx.cuh"
#include "kernels/smxx/row_output.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// Chunks whose order is permuted among themselves: XOR leaves higher bits of a chunk's number
// alone. A row of 64 * n elements is whole cycles of the 32 banks; a row of 32 * n is half a cycle
// more or less, so neighbours differ already and pairs of rows must.
template <int kHeadDim>
constexpr int kChunkCycle = kHeadDim % 64 == 0 ? 8 : 4;

// Byte offset of chunk `cycle * kChunkCycle + chunk` of a row.
template <int kHeadDim>
__device__ __forceinline__ constexpr int ChunkOffset(int row, int cycle, int chunk) {
  constexpr int kCycle = kChunkCycle<kHeadDim>;
  const int swizzle = kCycle == 8 ? row % 8 : row / 2 % 4;
  return row * (kHeadDim * 2) + cycle * (kCycle * 16) + (chunk ^ swizzle) * 16;
}

// The same for chunk 2 * step + odd.
template <int kHeadDim>
__device__ __forceinline__ constexpr int StepOffset(int row, int step, int odd) {
  constexpr int kSteps = kChunkCycle<kHeadDim> / 2;
  return ChunkOffset<kHeadDim>(row, step / kSteps, step % kSteps * 2 + odd);
}

// The shared memory address of chunk 2 * step + odd of a row, from that of chunk `odd`: rows start
// at multiples of a cycle, so that steps change bits of the address that nothing else does.
template <int kHeadDim>
__device__ __forceinline__ uint32_t StepAddress(uint32_t first, int step) {
  constexpr int kSteps = kChunkCycle<kHeadDim> / 2;
  return (first ^ (step % kSteps * 32)) + step / kSteps * (kChunkCycle<kHeadDim> * 16);
}

// A thread's share of copying its team's K and V tiles.
template <class C>
struct TileCopy {
  static constexpr int kCycle = kChunkCycle<C::kKvWidth>;
  static constexpr int kRowsAtOnce = C::kTeamThreads / kCycle;
  static constexpr int kSwizzledRows = 8;  // the swizzle repeats after so many rows
  static_assert(kRowsAtOnce % kSwizzledRows == 0 || (kRowsAtOnce == 4 && kCycle == 8));

  static __device__ __forceinline__ int FirstRow() {
    return static_cast<int>(threadIdx.x) % C::kTeamThreads / kCycle;
  }
  static __device__ __forceinline__ int Chunk() { return threadIdx.x % kCycle; }

  // Where the share begins, in bytes from where a tile does.
  static __device__ __forceinline__ int64_t Offset(int64_t row_stride) {
    return FirstRow() * row_stride + Chunk() * 16;
  }

  // Starts copying a tile of kTileTokens rows, of which only the first `tokens` exist; the others
  // become zeros, so that what their memory holds (NaN, say) never meets a probability of 0. `from`
  // is where the share begins, `to` where the tile does.
  static __device__ __forceinline__ void Start(const std::byte* from, int64_t row_stride,
                                               int tokens, uint32_t to) {
    to += ChunkOffset<C::kKvWidth>(FirstRow(), 0, Chunk());
    tokens -= FirstRow();
#pragma unroll
    for (int row = 0; row < C::kTileTokens; row += kRowsAtOnce) {
      if (C::kTileTokens % kRowsAtOnce != 0 && FirstRow() + row >= C::kTileTokens) break;
      // Half a cycle of rows further, the swizzle differs in its highest bit.
      const uint32_t to_row = (row % kSwizzledRows == 0 ? to : to ^ 64) + row * C::kKvWidth * 2;
#pragma unroll
      for (int cycle = 0; cycle < C::kKvWidth / 8 / kCycle; ++cycle) {
        CopyAsync16(to_row + cycle * kCycle * 16, from + cycle * kCycle * 16, row < tokens);
      }
      from += kRowsAtOnce * row_stride;
    }
  }
};

// Starts copying the packed query rows of an item; the tile's other rows become zeros.
template <class C>
__device__ __forceinline__ void CopyQueryAsync(const WorkTile& work, int kv_head, RowDivider group,
                                               uint32_t to) {
  constexpr int kChunks = C::kHeadDim / 8;
  const std::byte* const query = work.query + kv_head * work.group_stride;
#pragma unroll
  for (int begin = 0; begin < C::kRows * kChunks; begin += C::kThreads) {
    const int index = begin + static_cast<int>(threadIdx.x);
    if (C::kRows * kChunks % C::kThreads != 0 && index >= C::kRows * kChunks) break;
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool exists = row < work.row_count;
    const int32_t packed_row = work.row_begin + (exists ? row : 0);
    const int32_t query_row = group.Divide(packed_row);
    const std::byte* const from = query + query_row * work.row_stride +
                                  (packed_row - query_row * group.divisor) * work.head_stride;
    CopyAsync16(to + StepOffset<C::kHeadDim>(row, chunk / 2, chunk % 2), from + chunk * 16, exists);
  }
}

// Turns Q, which is there, into -Q.
template <class C>
__device__ __forceinline__ void NegateQuery(std::byte* tile) {
  auto* const pairs = reinterpret_cast<uint32_t*>(tile);
  for (int n = threadIdx.x; n < C::kQueryBytes / 4; n += C::kThreads) pairs[n] ^= 0x80008000u;
  __syncthreads();
}

// From the address of a token's row to that of 16 * n tokens later.
template <int kHeadDim>
__device__ __forceinline__ uint32_t TokenAddress(uint32_t address, int n) {
  return address + n * 16 * kHeadDim * 2;
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_SHARED_TILE_CUH_
