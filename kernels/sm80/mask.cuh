// Which tokens a packed row sees, and which tiles need a mask at all.
#ifndef FLASHCORE_KERNELS_SM80_MASK_CUH_
#define FLASHCORE_KERNELS_SM80_MASK_CUH_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/config.cuh"
#include "kernels/smxx/row_output.cuh"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// K/V rows [begin, end); empty if begin >= end.
struct alignas(8) TokenRange {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool Has(int32_t token) const { return token >= begin && token < end; }
};

template <class C>
struct TileMask {
  // Writes what each row of the block's tile sees to `shared`: the block must be synchronised
  // before the first use.
  __device__ __forceinline__ TileMask(const BlockWork& work, RowDivider group, std::byte* shared)
      : all{work.all_begin, work.all_end}, seen(reinterpret_cast<TokenRange*>(shared)) {
    const int32_t kv_end = work.kv_end;
    const int32_t rounded_end = (kv_end + C::kTileTokens - 1) / C::kTileTokens * C::kTileTokens;
    if (all.begin <= work.kv_begin && all.end >= rounded_end) return;  // nothing to mask
#pragma unroll 1
    for (int row = threadIdx.x; row < C::kRows; row += C::kThreads) {
      const int64_t position = int64_t{group.Divide(work.row_begin + row)} + work.position;
      int64_t begin = 0;
      int64_t end = kv_end;
      if (work.mask.left != Mask::kUnbounded) begin = max(begin, position - work.mask.left);
      if (work.mask.right != Mask::kUnbounded) end = min(end, position + work.mask.right + 1);
      seen[row] = {static_cast<int32_t>(min(begin, int64_t{kv_end})),
                   static_cast<int32_t>(max(end, int64_t{0}))};
    }
  }

  // Whether some row must not see some place of the tile at kv_row. Same in the whole block.
  __device__ __forceinline__ bool Masks(int32_t kv_row) const {
    return kv_row < all.begin || kv_row + C::kTileTokens > all.end;
  }

  TokenRange all;    // what every row of the item sees: begins and ends never decrease with rows
  TokenRange* seen;  // [kRows], in shared memory
};

// Scores of tokens that a row does not see become -infinity, whatever they are: the row's
// probability of such a token is 0. Places of the tile at or beyond kv_end hold zeros (TileCopy),
// so their V adds nothing; a V row of the span that a row masks is still multiplied by 0, so V must
// be finite. `kv_row` is the tile's.
template <class C>
__device__ __forceinline__ void MaskScores(const TileMask<C>& mask, const Position<C>& position,
                                           int32_t kv_row,
                                           float (&scores)[C::kRowTiles][C::kScoreTiles][4]) {
  if (!mask.Masks(kv_row)) return;
  const int32_t token = kv_row + position.lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TokenRange seen = mask.seen[position.Row(m, i)];
#pragma unroll
      for (int n = 0; n < C::kScoreTiles; ++n) {
        if (!seen.Has(token + 8 * n)) scores[m][n][2 * i] = -INFINITY;
        if (!seen.Has(token + 8 * n + 1)) scores[m][n][2 * i + 1] = -INFINITY;
      }
    }
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MASK_CUH_
