// Which tokens a packed row sees, which tiles need a mask at all, and how V rows that hold an
// infinity or NaN are kept from the rows that do not see them.
#ifndef FLASHCORE_KERNELS_SM80_MASK_CUH_
#define FLASHCORE_KERNELS_SM80_MASK_CUH_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/smxx/element.cuh"

namespace flashcore::kernels::sm80 {

// K/V rows [begin, end); empty if begin >= end.
struct TokenRange {
  int32_t begin;
  int32_t end;

  __device__ __forceinline__ bool Has(int32_t token) const { return token >= begin && token < end; }
};

// The K/V rows up to kv_end that a packed row of a span sees.
__device__ __forceinline__ TokenRange SeenBy(const Span& span, int32_t group, int32_t packed_row,
                                             int32_t kv_end) {
  const int64_t position = int64_t{packed_row / group} + span.kv.rows - span.query_rows;
  int64_t begin = 0;
  int64_t end = kv_end;
  if (span.mask.left != Mask::kUnbounded) begin = max(begin, position - span.mask.left);
  if (span.mask.right != Mask::kUnbounded) end = min(end, position + span.mask.right + 1);
  return {static_cast<int32_t>(min(begin, int64_t{kv_end})),
          static_cast<int32_t>(max(end, int64_t{0}))};
}

template <class C>
struct TileMask {
  __device__ __forceinline__ TileMask(const Span& span, const WorkItem& item, int32_t group,
                                      const Position<C>& position)
      : kv_end(item.kv_end),
        all{SeenBy(span, group, item.row_begin + item.row_count - 1, kv_end).begin,
            SeenBy(span, group, item.row_begin, kv_end).end} {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      seen[i] = SeenBy(span, group, item.row_begin + position.Row(i), kv_end);
    }
  }

  // Whether some row must not see some place of the tile at kv_row. Same in the whole block.
  __device__ __forceinline__ bool Masks(int32_t kv_row) const {
    return kv_row < all.begin || kv_row + kPageTokens > all.end;
  }

  // Whether there is a token at one of those places.
  __device__ __forceinline__ bool Hides(int32_t kv_row) const {
    return kv_row < all.begin || min(kv_row + kPageTokens, kv_end) > all.end;
  }

  int32_t kv_end;
  TokenRange all;      // what every row of the item sees: begins and ends never decrease with rows
  TokenRange seen[2];  // what this thread's rows see
};

// Scores of tokens that a row does not see become -infinity, whatever they are. `token` is the
// first of this thread's tokens.
template <class C>
__device__ __forceinline__ void MaskScores(const TileMask<C>& mask, int32_t token,
                                           float (&scores)[C::kScoreTiles][4]) {
#pragma unroll
  for (int n = 0; n < C::kScoreTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (!mask.seen[c / 2].Has(token + 8 * n + c % 2)) scores[n][c] = -INFINITY;
    }
  }
}

// Calls fn with a pointer to every pair of elements in this thread's share of a V tile.
template <class C, class Fn>
__device__ __forceinline__ void ForEachPair(std::byte* tile, const Fn& fn) {
  auto* pairs = reinterpret_cast<uint32_t*>(tile);
  for (int n = threadIdx.x; n < C::kTileBytes / 4; n += C::kThreads) fn(&pairs[n]);
}

// For tiles that hide tokens: 0 times an infinity or NaN is NaN, so such elements of V must not be
// multiplied with the probabilities of rows that do not see them. They are added to O of the rows
// that do, which is what multiplying would come to, and replaced by zeros in the tile. Nearly
// always there are none, and all this costs is reading the tile once. `kv_row` is the tile's.
template <class C>
__device__ __forceinline__ void ExtractNonFinite(const TileMask<C>& mask,
                                                 const Position<C>& position, int32_t kv_row,
                                                 std::byte* tile,
                                                 float (&output)[C::kOutputTiles][4]) {
  using Element = typename C::Element;
  bool found = false;
  ForEachPair<C>(tile, [&](uint32_t* pair) { found |= HasNonFinite<Element>(*pair); });
  if (!__syncthreads_or(found)) return;

  const int first = position.token_warp * C::kWarpTokens;
#pragma unroll 1
  for (int token = first; token < first + C::kWarpTokens; ++token) {
#pragma unroll
    for (int n = 0; n < C::kOutputTiles; ++n) {
      uint32_t pair;
      memcpy(&pair, tile + StepOffset<C::kHeadDim>(token, n / 2, n % 2) + position.lane % 4 * 4,
             sizeof(pair));
      if (!HasNonFinite<Element>(pair)) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float value = ElementTraits<Element>::Unpack(pair, c % 2);
        if (mask.seen[c / 2].Has(kv_row + token) && !isfinite(value)) output[n][c] += value;
      }
    }
  }
  __syncthreads();
  ForEachPair<C>(tile, [](uint32_t* pair) {
    if (HasNonFinite<Element>(*pair & 0xffffu)) *pair &= 0xffff0000u;
    if (HasNonFinite<Element>(*pair & 0xffff0000u)) *pair &= 0xffffu;
  });
  __syncthreads();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MASK_CUH_
