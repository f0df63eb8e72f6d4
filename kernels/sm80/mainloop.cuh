// The main loop: every K/V tile of a work item against the item's query rows.
//
// K and V tiles come through two rings of kStages buffers, each copy a group of its own, in the
// order K0 V0 K1 V1 ... Before using a tile a thread waits for its own copies of it, then for
// everybody's. The same barrier tells that everybody has left the buffer that is refilled next:
// the V buffer of the tile before when K is waited for, this tile's K buffer when V is. So V of a
// tile arrives during its Q K^T, and the next K during P V, even with a single stage.
#ifndef FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
#define FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/mask.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/softmax.cuh"
#include "kernels/smxx/element.cuh"

namespace flashcore::kernels::sm80 {

// The K/V tiles of a work item, on their way from global memory to shared memory.
template <class C>
class TileRing {
 public:
  __device__ __forceinline__ TileRing(const KvView& kv, const WorkItem& item, std::byte* shared)
      : num_tiles((item.kv_end - item.kv_begin + kPageTokens - 1) / kPageTokens),
        kv_begin_(item.kv_begin),
        kv_end_(item.kv_end),
        key_(kv.key + item.kv_head * kv.head_stride),
        value_(kv.value + item.kv_head * kv.head_stride),
        pages_(kv.pages),
        page_stride_(kv.page_stride),
        row_stride_(kv.row_stride),
        shared_(shared) {}

  __device__ __forceinline__ int32_t KvRow(int tile) const {
    return kv_begin_ + tile * kPageTokens;
  }
  __device__ __forceinline__ std::byte* Key(int tile) const {
    return shared_ + tile % C::kStages * C::kTileBytes;
  }
  __device__ __forceinline__ std::byte* Value(int tile) const {
    return shared_ + (C::kStages + tile % C::kStages) * C::kTileBytes;
  }

  // Where the tile lies, in bytes from K's and V's first; 0 if there is no such tile.
  __device__ __forceinline__ int64_t Offset(int tile) const {
    if (tile >= num_tiles) return 0;
    const int32_t page = KvRow(tile) / kPageTokens;
    return (pages_ != nullptr ? pages_[page] : page) * page_stride_;
  }

  // Start copying, and close the group. It is empty if there is no such tile.
  __device__ __forceinline__ void CopyKey(int tile, int64_t offset) const {
    Copy(tile, key_ + offset, Key(tile));
  }
  __device__ __forceinline__ void CopyValue(int tile, int64_t offset) const {
    Copy(tile, value_ + offset, Value(tile));
  }

  const int num_tiles;

 private:
  __device__ __forceinline__ void Copy(int tile, const std::byte* from, std::byte* to) const {
    if (tile < num_tiles) CopyTileAsync<C>(from, row_stride_, kv_end_ - KvRow(tile), to);
    CommitCopies();
  }

  const int32_t kv_begin_;
  const int32_t kv_end_;
  const std::byte* const key_;
  const std::byte* const value_;
  const int32_t* const pages_;
  const int64_t page_stride_;
  const int64_t row_stride_;
  std::byte* const shared_;
};

// A warp's 16 query rows as operands of Q K^T.
template <class C>
class QueryOperands {
 public:
  __device__ __forceinline__ QueryOperands(const std::byte* tile, const Position<C>& position)
      : tile_(tile), row_(position.row_warp * 16), lane_(position.lane) {
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        LoadQuery<C::kHeadDim>(tile_, row_, step, lane_, registers_[step]);
      }
    }
  }

  // Those of components [16 * step, 16 * step + 16).
  __device__ __forceinline__ const uint32_t (&Get(int step))[4] {
    if constexpr (C::kQueryInRegisters) {
      return registers_[step];
    } else {
      LoadQuery<C::kHeadDim>(tile_, row_, step, lane_, registers_[0]);
      return registers_[0];
    }
  }

 private:
  static constexpr int kSteps = C::kHeadDim / 16;

  const std::byte* const tile_;
  const int row_;
  const int lane_;
  uint32_t registers_[C::kQueryInRegisters ? kSteps : 1][4];
};

// scores = scale * Q K^T of the warp's rows and tokens.
template <class C>
__device__ __forceinline__ void ComputeScores(QueryOperands<C>* query, const std::byte* keys,
                                              const Position<C>& position, float scale,
                                              float (&scores)[C::kScoreTiles][4]) {
  using Element = typename C::Element;
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] = 0;
  }
#pragma unroll C::kScoreUnroll
  for (int step = 0; step < C::kHeadDim / 16; ++step) {
    const uint32_t(&rows)[4] = query->Get(step);
#pragma unroll
    for (int n = 0; n < C::kScoreTiles; n += 2) {
      uint32_t key[4];
      LoadKeys<C::kHeadDim>(keys, position.token_warp * C::kWarpTokens + 8 * n, step, position.lane,
                            key);
      MultiplyAdd<Element>(rows, key[0], key[1], scores[n]);
      MultiplyAdd<Element>(rows, key[2], key[3], scores[n + 1]);
    }
  }
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] *= scale;
  }
}

// output += P V. The accumulators of Q K^T are laid out as the operands of P V need them: a pair of
// tiles of 8 tokens is one operand of 16.
template <class C>
__device__ __forceinline__ void AddValues(const float (&probabilities)[C::kScoreTiles][4],
                                          const std::byte* values, const Position<C>& position,
                                          float (&output)[C::kOutputTiles][4]) {
  using Element = typename C::Element;
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; n += 2) {
    const float(&first)[4] = probabilities[n];
    const float(&second)[4] = probabilities[n + 1];
    const uint32_t rows[4] = {ElementTraits<Element>::Pack(first[0], first[1]),
                              ElementTraits<Element>::Pack(first[2], first[3]),
                              ElementTraits<Element>::Pack(second[0], second[1]),
                              ElementTraits<Element>::Pack(second[2], second[3])};
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {
      uint32_t value[4];
      LoadValues<C::kHeadDim>(values, position.token_warp * C::kWarpTokens + 8 * n, step,
                              position.lane, value);
      MultiplyAdd<Element>(rows, value[0], value[1], output[2 * step]);
      MultiplyAdd<Element>(rows, value[2], value[3], output[2 * step + 1]);
    }
  }
}

// Attends the item's rows to its K/V. Leaves no copy under way, and nobody reading shared memory.
// `scale` is softmax_scale * log2(e).
template <class C>
__device__ __forceinline__ void AttendTiles(const Span& span, const WorkItem& item, int32_t group,
                                            float scale, const Position<C>& position,
                                            std::byte* shared, State<C>* state) {
  const TileMask<C> mask(span, item, group, position);
  const TileRing<C> ring(span.kv, item, shared + C::kQueryBytes);

  CopyQueryAsync<C>(span, item, group, shared);  // in one group with K0
  int64_t offset = 0;                            // of the newest tile whose K has been asked for
#pragma unroll
  for (int tile = 0; tile < C::kStages; ++tile) {
    if (tile > 0) ring.CopyValue(tile - 1, offset);
    offset = ring.Offset(tile);
    ring.CopyKey(tile, offset);
  }
  // Whenever a tile is waited for, so many younger groups have been closed.
  constexpr int kYounger = 2 * (C::kStages - 1);
  WaitForCopies<kYounger>();
  __syncthreads();
  QueryOperands<C> query(shared, position);

#pragma unroll 1
  for (int tile = 0; tile < ring.num_tiles; ++tile) {
    WaitForCopies<kYounger>();
    __syncthreads();
    ring.CopyValue(tile + C::kStages - 1, offset);
    offset = ring.Offset(tile + C::kStages);

    float scores[C::kScoreTiles][4];
    ComputeScores<C>(&query, ring.Key(tile), position, scale, scores);
    const int32_t kv_row = ring.KvRow(tile);
    if (mask.Masks(kv_row)) {
      const int token = position.token_warp * C::kWarpTokens + position.lane % 4 * 2;
      MaskScores<C>(mask, kv_row + token, scores);
    }
    UpdateSoftmax<C>(scores, state);

    WaitForCopies<kYounger>();
    __syncthreads();
    ring.CopyKey(tile + C::kStages, offset);
    if (mask.Hides(kv_row)) {
      ExtractNonFinite<C>(mask, position, kv_row, ring.Value(tile), state->output);
    }
    AddValues<C>(scores, ring.Value(tile), position, state->output);
  }
  WaitForCopies<0>();
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MAINLOOP_CUH_
