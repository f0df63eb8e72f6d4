// Which tokens are visible to a packed row, and which K/V tiles need a mask.
#ifndef FLASHCORE_KERNELS_SM80_MASK_CUH_
#define FLASHCORE_KERNELS_SM80_MASK_CUH_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// K/V rows [begin, end); empty if begin >= end.
struct alignas(8) TokenRange {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool Has(int32_t token) const { return token >= begin && token < end; }
};

template <class C>
struct TileMask {
  // Writes the visible tokens of every row of the work tile to `shared` [kRows]. The caller
  // synchronises the block before the first MaskScores.
  __device__ __forceinline__ TileMask(const Work& work, RowDivider group, std::byte* shared)
      : all{work.tile.all_begin, work.tile.all_end},
        visible(reinterpret_cast<TokenRange*>(shared)) {
    const int32_t kv_end = work.tile.kv_end;
    const int32_t rounded_end = (kv_end + C::kTileTokens - 1) / C::kTileTokens * C::kTileTokens;
    if (all.begin <= work.tile.kv_begin && all.end >= rounded_end) return;  // no tile needs a mask
#pragma unroll 1
    for (int row = threadIdx.x; row < C::kRows; row += C::kThreads) {
      const int64_t query_position =
          int64_t{group.Divide(work.tile.row_begin + row)} + work.span.position;
      int64_t begin = 0;
      int64_t end = kv_end;
      if (work.span.terms.mask.left != Mask::kUnbounded)
        begin = max(begin, query_position - work.span.terms.mask.left);
      if (work.span.terms.mask.right != Mask::kUnbounded)
        end = min(end, query_position + work.span.terms.mask.right + 1);
      visible[row] = {static_cast<int32_t>(min(begin, int64_t{kv_end})),
                      static_cast<int32_t>(max(end, int64_t{0}))};
    }
  }

  // Whether a token of the tile at kv_row is not visible to some row. The same in all threads.
  __device__ __forceinline__ bool NeedsMask(int32_t kv_row) const {
    return kv_row < all.begin || kv_row + C::kTileTokens > all.end;
  }

  TokenRange all;       // visible to every row of the work tile; ends at or before kv_end
  TokenRange* visible;  // [kRows], in shared memory
};

// Sets the scores of tokens that are not visible to -infinity, whatever they were, so their
// probabilities are 0. V still multiplies these zeros: tokens at or beyond kv_end are zeros in
// shared memory (TileCopy), and the span's own V must be finite. `kv_row` is the tile's first.
template <class C>
__device__ __forceinline__ void MaskScores(const TileMask<C>& mask, int32_t kv_row,
                                           float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  if (!mask.NeedsMask(kv_row)) return;
  const ThreadPosition<C> thread;
  const int32_t token = kv_row + thread.FirstToken();
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TokenRange visible = mask.visible[thread.Row(m, i)];
#pragma unroll
      for (int n = 0; n < C::kScoreTiles; ++n) {
        float(&tile)[4] = scores[m][n];
        const int32_t first = token + C::kMmaColumns * n;
        if (!visible.Has(first)) tile[AccumulatorAt<C>(i, 0)] = -INFINITY;
        if (!visible.Has(first + C::kTokenStep)) tile[AccumulatorAt<C>(i, 1)] = -INFINITY;
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MASK_CUH_
