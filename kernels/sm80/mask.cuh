// Which tokens a packed row sees, which tiles need a mask at all, and how V rows that hold an
// infinity or NaN are kept from the rows that do not see them.
#ifndef FLASHCORE_KERNELS_SM80_MASK_CUH_
#define FLASHCORE_KERNELS_SM80_MASK_CUH_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/shared_tile.cuh"
#include "kernels/smxx/e4m3.cuh"
#include "kernels/smxx/element.cuh"
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
  __device__ __forceinline__ TileMask(const WorkTile& work, RowDivider group, std::byte* shared)
      : kv_end(work.kv_end),
        all{work.all_begin, work.all_end},
        seen(reinterpret_cast<TokenRange*>(shared)) {
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

  // Whether some row must not see some token of those that are looked through together, whose
  // first is at kv_row.
  __device__ __forceinline__ bool Hides(int32_t kv_row) const {
    return kv_row < all.begin || min(kv_row + C::kVoteTokens, kv_end) > all.end;
  }

  int32_t kv_end;
  TokenRange all;    // what every row of the item sees: begins and ends never decrease with rows
  TokenRange* seen;  // [kRows], in shared memory
};

// Scores of tokens that a row does not see become -infinity, whatever they are. `kv_row` is the
// tile's.
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

// Calls fn with a pointer to every 4 bytes of this thread's share of the team's V tile.
template <class C, class Fn>
__device__ __forceinline__ void ForEachWord(std::byte* tile, const Fn& fn) {
  auto* words = reinterpret_cast<uint32_t*>(tile);
#pragma unroll 1
  for (int n = threadIdx.x % C::kTeamThreads; n < C::kTileBytes / 4; n += C::kTeamThreads) {
    fn(&words[n]);
  }
}

// Adds the infinities and NaN among `word`, this lane's 4 bytes of a token's chunk of V, to O of
// the rows that see the token.
template <class C>
__device__ __forceinline__ void AddNonFinite(const TileMask<C>& mask, const Position<C>& position,
                                             int32_t token, int chunk, uint32_t word,
                                             State<C>* state) {
  // E4M3 V has a tile of even columns and one of odd (operands.cuh).
  constexpr int kTiles = C::kStepOperands;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 2 * kTiles; ++k) {
        const float value = ElementTraits<typename C::KvElement>::Unpack(word, k);
        const bool seen = mask.seen[position.Row(m, i)].Has(token);
        if (seen && !isfinite(value)) {
          state->output[m][kTiles * chunk + k % kTiles].Add(2 * i + k / kTiles, value);
        }
      }
    }
  }
}

// For tiles that hide tokens: 0 times an infinity or NaN is NaN, so such elements of V must not be
// multiplied with the probabilities of rows that do not see them. They are added to O of the rows
// that do, which is what multiplying would come to, and replaced by zeros in the tile. Nearly
// always there are none, and all this costs is reading the tile once. `kv_row` is the tile's,
// `address` its place in `shared`; a team that has no tile takes part with what lies there.
template <class C>
__device__ __forceinline__ void HideNonFinite(const TileMask<C>& mask, const Position<C>& position,
                                              int32_t kv_row, std::byte* shared, uint32_t address,
                                              State<C>* state) {
  std::byte* const tile = shared + (address - SharedAddress(shared));
  using KvElement = typename C::KvElement;
  bool found = false;
  ForEachWord<C>(tile, [&](uint32_t* word) { found |= HasNonFinite<KvElement>(*word); });
  if (!SyncVotersOr<C>(found)) return;

#pragma unroll 1
  for (int token = 0; token < C::kTileTokens; ++token) {
#pragma unroll
    for (int chunk = 0; chunk < C::kKvWidth / 8; ++chunk) {
      uint32_t word;
      const int offset = StepOffset<C::kKvWidth>(token, chunk / 2, chunk % 2);
      memcpy(&word, tile + offset + position.lane % 4 * 4, sizeof(word));
      if (!HasNonFinite<KvElement>(word)) continue;
      AddNonFinite<C>(mask, position, kv_row + token, chunk, word, state);
    }
  }
  SyncVoters<C>();
  ForEachWord<C>(tile, [](uint32_t* word) { *word = WithoutNonFinite<KvElement>(*word); });
  SyncVoters<C>();
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_MASK_CUH_
