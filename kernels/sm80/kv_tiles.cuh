// Copies of K/V tiles from global to shared memory.
#ifndef FLASHCORE_KERNELS_SM80_KV_TILES_CUH_
#define FLASHCORE_KERNELS_SM80_KV_TILES_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// Copies K/V tiles of the work tile from global to shared memory.
template <class C>
class KvTiles {
 public:
  __device__ __forceinline__ explicit KvTiles(const Work& work)
      : work_(work),
        kv_begin_(GroupBegin(work.tile)),
        kv_end_(GroupEnd(work.tile)),
        kv_head_(KvHead()) {}

  // Whether there is a tile that begins at this K/V row.
  __device__ __forceinline__ bool Has(int32_t row) const { return row < kv_end_; }

  // Whether the phase has a tile less than the one that has most.
  __device__ __forceinline__ bool IsOneTileShort(int phase) const {
    return NumTiles(PhaseBegin(phase)) < NumTiles(kv_begin_);
  }

 protected:
  static constexpr int kStride = C::kPhases * C::kTileTokens;  // rows between a phase's tiles

  // Tiles of a phase whose first one is at `begin`.
  __device__ __forceinline__ int NumTiles(int32_t begin) const {
    return max(0, kv_end_ - begin + kStride - 1) / kStride;
  }

  // First row of a phase: every kPhases-th tile is its. A tile's phase depends only on its place
  // in the K/V, not on where the work tile begins.
  __device__ __forceinline__ int32_t PhaseBegin(int phase) const {
    const int tile = kv_begin_ / C::kTileTokens;  // kPhases is a power of 2
    return kv_begin_ + ((phase - tile) & (C::kPhases - 1)) * C::kTileTokens;
  }

  // The page of the tile at a row; 0 if there is no such tile.
  __device__ __forceinline__ int32_t Page(int32_t row) const {
    return Has(row) ? work_.span.PageOf(row) : 0;
  }

  // Starts copying this thread's part of a tile of K or V, which is in `page`, to a shared address.
  __device__ __forceinline__ void CopyTile(const std::byte* WorkSpan::*tensor, int32_t page,
                                           int32_t row, uint32_t to) const {
    const TileCopy<C> copy;
    const WorkSpan& span = work_.span;
    const std::byte* from = span.*tensor;
    if constexpr (C::kCodes) {
      // Constants and 32 bits, as far as they do, for fewer instructions in the loop of a decode.
      from += page * span.page_stride;
      from +=
          static_cast<uint32_t>(kv_head_ * C::kHeadPageBytes + row % kPageTokens * C::kKvRowBytes) +
          copy.Offset(C::kKvRowBytes);
      copy.CopyAsync(from, C::kKvRowBytes, kv_end_ - row, to);
      return;
    }
    from += kv_head_ * span.kv_head_stride + copy.Offset(span.kv_row_stride);
    from += page * span.page_stride;
    if constexpr (C::kTileTokens != kPageTokens) from += row % kPageTokens * span.kv_row_stride;
    copy.CopyAsync(from, span.kv_row_stride, kv_end_ - row, to);
  }

  // The same of K, with the scales of its rows and of V's.
  __device__ __forceinline__ void CopyKeyTile(int32_t page, int32_t row, uint32_t to) const {
    CopyTile(&WorkSpan::key, page, row, to);
    if constexpr (C::kCodes) {
      const WorkSpan& span = work_.span;
      const int64_t scales =
          page * span.page_stride +
          static_cast<uint32_t>(kv_head_ * C::kHeadPageBytes + kPageTokens * C::kKvRowBytes +
                                row % kPageTokens * 2);
      TileCopy<C>::CopyScalesAsync(span.key + scales, span.value + scales, kv_end_ - row,
                                   to + C::kTileBytes);
    }
  }

  // Whether the warp group attends a split of a run by itself.
  static __device__ __forceinline__ bool HasOwnSplit(const WorkTile& tile) {
    return C::kAddsPhases && tile.IsRun();
  }

  const Work work_;
  const int32_t kv_begin_;  // of the group
  const int32_t kv_end_;

 private:
  static __device__ __forceinline__ int32_t GroupBegin(const WorkTile& tile) {
    if (!HasOwnSplit(tile)) return tile.kv_begin;
    return tile.kv_begin + ThreadPosition<C>().warp_group * tile.split_rows;
  }
  static __device__ __forceinline__ int32_t GroupEnd(const WorkTile& tile) {
    if (!HasOwnSplit(tile)) return tile.kv_end;
    return min(tile.kv_end, GroupBegin(tile) + tile.split_rows);
  }

  const int kv_head_;
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_KV_TILES_CUH_
