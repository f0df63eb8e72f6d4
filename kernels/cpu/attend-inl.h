// One work item of fused attention, from its query rows to its output rows. Included once per SIMD
// target.
//
// For each K/V tile of 64 tokens: scores = Q K^T, online softmax turns them into probabilities,
// O = O * rescale + P V. Only one tile of scores exists at a time. Many packed rows share a tile
// that is converted to float32 (K transposed) in scratch; few rows (decode) read K and V where
// they lie, because converting would cost more than multiplying. The many rows of a shared item
// share a converted tile too, but K is not transposed: each row's sums must run in the order in
// which its span alone, of few rows, has them.
#if defined(FLASHCORE_KERNELS_CPU_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#undef FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#else
#define FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/multiply-inl.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/partials.h"
#include "kernels/plan.h"
#include "kernels/tile_config.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

// A tile of K/V rows of one KV head, in place.
struct Tile {
  const std::byte* key;
  const std::byte* value;
  int tokens;  // rows of it that exist and that somebody sees
};

HWY_INLINE Tile TileAt(const KvView& kv, int32_t kv_head, int32_t kv_row, int32_t kv_end) {
  const int32_t tile = kv_row / kPageTokens;
  const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
  const int64_t offset = page * kv.page_stride + kv_head * kv.head_stride;
  return {kv.key + offset, kv.value + offset, std::min(kPageTokens, kv_end - kv_row)};
}

// The tokens of the tile at kv_row that packed row r of the item sees.
HWY_INLINE TokenRange SeenTokens(const Span& span, int32_t group, int32_t packed_row,
                                 int32_t kv_row, int tokens) {
  const int64_t position = int64_t{packed_row / group} + span.kv.rows - span.query_rows - kv_row;
  int64_t begin = 0;
  int64_t end = tokens;
  if (span.mask.left != Mask::kUnbounded) begin = position - span.mask.left;
  if (span.mask.right != Mask::kUnbounded) end = position + span.mask.right + 1;
  return {static_cast<int>(std::clamp<int64_t>(begin, 0, tokens)),
          static_cast<int>(std::clamp<int64_t>(end, 0, tokens))};
}

// Whether the item's scores are dot products along K rows, or else products with a transposed K
// tile, which sum in another order.
HWY_INLINE bool ScoresAreDots(const WorkItem& item) {
  return item.num_members > 0 || item.row_count <= kCpuFewRows;
}

// Converts a member's packed query rows to scratch, scale and change of base folded in.
template <DType kType>
HWY_INLINE void LoadQuery(const AttentionBatch& batch, const WorkItem& item, const Member& member,
                          Scratch* scratch) {
  const FloatTag d;
  const Span& span = batch.spans[member.span];
  const int32_t group = batch.geometry.group();
  const int32_t head_dim = batch.geometry.head_dim;
  const VecF scale = hn::Set(d, span.softmax_scale * 1.44269504088896340736f);  // log2(e)
  for (int r = 0; r < member.row_count; ++r) {
    const int32_t row = item.row_begin + r;
    const int64_t head = int64_t{item.kv_head} * group + row % group;
    const auto* from = reinterpret_cast<const uint16_t*>(
        span.query + row / group * span.row_stride + head * span.head_stride);
    float* to = scratch->query + (member.tile_row + r) * head_dim;
    for (int c = 0; c < head_dim; c += kLanes) {
      hn::Store(hn::Mul(LoadElements<kType>(d, from + c), scale), d, to + c);
    }
  }
}

HWY_INLINE void ClearState(int rows, int head_dim, Scratch* scratch) {
  std::fill_n(scratch->output, rows * head_dim, 0.0f);
  std::fill_n(scratch->sum, rows * kMaxLanes, 0.0f);
  std::fill_n(scratch->max, rows, kNoScore);
}

// Converts rows of K or V to float32 rows of `to`, head_dim floats each.
template <DType kType>
HWY_INLINE void ConvertRows(const std::byte* from, int64_t row_stride, int rows, int head_dim,
                            float* HWY_RESTRICT to) {
  const FloatTag d;
  for (int j = 0; j < rows; ++j) {
    const auto* row = reinterpret_cast<const uint16_t*>(from + j * row_stride);
    for (int c = 0; c < head_dim; c += kLanes) {
      hn::Store(LoadElements<kType>(d, row + c), d, to + j * head_dim + c);
    }
  }
}

// Scores of the packed rows [first, last) against all 64 tokens of the tile. Scores of tokens that
// do not exist are meaningless.
template <DType kType>
HWY_INLINE void TileScores(const Tile& tile, const NextTile& next, int64_t row_stride, int head_dim,
                           bool dots, int first, int last, Scratch* scratch) {
  const float* query = scratch->query + first * head_dim;
  float* scores = scratch->scores + first * kPageTokens;
  const int count = last - first;
  if (dots && count > kCpuFewRows) {
    ConvertRows<kType>(tile.key, row_stride, tile.tokens, head_dim, scratch->key);
    DotScores(query, FloatRows{scratch->key, head_dim}, next, head_dim, scores, count);
    return;
  }
  const uint16_t* rows[kPageTokens];
  for (int j = 0; j < kPageTokens; ++j) {
    rows[j] = j < tile.tokens ? reinterpret_cast<const uint16_t*>(tile.key + j * row_stride)
                              : scratch->zeros;
  }
  if (dots) {
    DotScores(query, ScatteredRows<kType>{rows}, next, head_dim, scores, count);
    return;
  }
  TransposeKeys<kType>(rows, head_dim, scratch->key);
  Multiply(query, head_dim, FloatRows{scratch->key, kPageTokens}, TokenRange{0, head_dim}, nullptr,
           false, nullptr, scores, kPageTokens, count, kPageTokens);
}

// O = O * rescale + P V for the packed rows [first, last). `seen` is null if they all see all of
// the tile; otherwise entry r is row first + r's, and rows that hold an infinity or NaN may only
// meet the rows that see them, because 0 times either is NaN.
template <DType kType>
HWY_INLINE void TileOutput(const Tile& tile, int64_t row_stride, int head_dim, int first, int last,
                           const TokenRange* seen, Scratch* scratch) {
  bool exactly = false;
  for (int j = 0; seen != nullptr && j < tile.tokens && !exactly; ++j) {
    const std::byte* row = tile.value + j * row_stride;
    exactly = HasNonFinite<kType>(reinterpret_cast<const uint16_t*>(row), head_dim);
  }
  const float* probabilities = scratch->scores + first * kPageTokens;
  const float* rescale = scratch->rescale + first;
  float* output = scratch->output + first * head_dim;
  const TokenRange all{0, tile.tokens};
  if (last - first <= kCpuFewRows) {
    Multiply(probabilities, kPageTokens, ElementRows<kType>{tile.value, row_stride}, all, seen,
             exactly, rescale, output, head_dim, last - first, head_dim);
    return;
  }
  ConvertRows<kType>(tile.value, row_stride, tile.tokens, head_dim, scratch->value);
  Multiply(probabilities, kPageTokens, FloatRows{scratch->value, head_dim}, all, seen, exactly,
           rescale, output, head_dim, last - first, head_dim);
}

template <DType kType>
HWY_INLINE void AttendTile(const AttentionBatch& batch, const WorkItem& item, int32_t kv_row,
                           Scratch* scratch) {
  const Span& span = batch.spans[item.span];
  const int32_t group = batch.geometry.group();
  const int head_dim = batch.geometry.head_dim;
  const Tile tile = TileAt(span.kv, item.kv_head, kv_row, item.kv_end);

  // Begins and ends never decrease from row to row: if the last row's begin is 0 and the first
  // row's end is 64, every row sees the whole tile. So do all rows of a shared item.
  const auto seen_by = [&](int r) {
    return SeenTokens(span, group, item.row_begin + r, kv_row, tile.tokens);
  };
  int first = 0;
  int last = item.row_count;
  const bool masked =
      item.num_members == 0 && (seen_by(last - 1).begin > 0 || seen_by(0).end < kPageTokens);
  TokenRange seen[Scratch::kRows];
  if (masked) {
    for (int r = 0; r < item.row_count; ++r) seen[r] = seen_by(r);
    while (first < last && seen[first].begin >= seen[first].end) ++first;
    while (first < last && seen[last - 1].begin >= seen[last - 1].end) --last;
    if (first == last) return;
  }

  NextTile next;
  if (kv_row + kPageTokens < item.kv_end) {
    const Tile after = TileAt(span.kv, item.kv_head, kv_row + kPageTokens, item.kv_end);
    next = {after.key, after.value, span.kv.row_stride};
  }
  TileScores<kType>(tile, next, span.kv.row_stride, head_dim, ScoresAreDots(item), first, last,
                    scratch);
  for (int r = first; r < last; ++r) {
    if (masked) {
      SoftmaxRow<true>(r, seen[r], scratch);
    } else {
      SoftmaxRow<false>(r, {}, scratch);
    }
  }
  TileOutput<kType>(tile, span.kv.row_stride, head_dim, first, last,
                    masked ? seen + first : nullptr, scratch);
}

// Writes one finished packed row: O / sum as elements, and the LSE.
template <DType kType>
HWY_INLINE void WriteRow(const AttentionBatch& batch, int32_t span_index, int32_t kv_head,
                         int32_t packed_row, const float* output, float max, float sum) {
  const FloatTag d;
  const Span& span = batch.spans[span_index];
  const int32_t group = batch.geometry.group();
  const int64_t head = int64_t{kv_head} * group + packed_row % group;
  const int64_t row = packed_row / group;
  auto* to =
      reinterpret_cast<uint16_t*>(span.output + row * span.row_stride + head * span.head_stride);
  const VecF scale = hn::Set(d, sum == 0 ? 0.0f : 1.0f / sum);
  for (int c = 0; c < batch.geometry.head_dim; c += kLanes) {
    StoreElements<kType>(d, hn::Mul(hn::LoadU(d, output + c), scale), to + c);
  }
  if (span.lse != nullptr) {
    constexpr float kLn2 = 0.693147180559945309417f;
    span.lse[row * span.lse_row_stride + head * span.lse_head_stride] =
        sum == 0 ? kNoScore : max * kLn2 + std::log(sum);
  }
}

// Writes a member's rows: to its O and LSE, or to its partial rows.
template <DType kType>
HWY_INLINE void StoreResult(const AttentionBatch& batch, const WorkItem& item, const Member& member,
                            const Partials& partials, const Scratch& scratch) {
  const FloatTag d;
  const int head_dim = batch.geometry.head_dim;
  for (int r = 0; r < member.row_count; ++r) {
    const int at = member.tile_row + r;
    const float* output = scratch.output + at * head_dim;
    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, scratch.sum + at * kMaxLanes)));
    if (member.partial_row < 0) {
      WriteRow<kType>(batch, member.span, item.kv_head, item.row_begin + r, output, scratch.max[at],
                      sum);
    } else {
      const int32_t row = member.partial_row + r;
      std::copy_n(output, head_dim, partials.OutputRow(row));
      partials.max[row] = scratch.max[at];
      partials.sum[row] = sum;
    }
  }
}

template <DType kType>
HWY_INLINE void AttendItemTyped(const AttentionBatch& batch, const Plan& plan, const WorkItem& item,
                                const Partials& partials, Scratch* scratch) {
  const Member itself{item.span, 0, item.row_count, item.partial_row};
  const bool shared = item.num_members > 0;
  const Member* const members = shared ? plan.members.data() + item.first_member : &itself;
  const int num_members = shared ? item.num_members : 1;

  for (int m = 0; m < num_members; ++m) LoadQuery<kType>(batch, item, members[m], scratch);
  ClearState(item.row_count, batch.geometry.head_dim, scratch);
  for (int32_t kv_row = item.kv_begin; kv_row < item.kv_end; kv_row += kPageTokens) {
    AttendTile<kType>(batch, item, kv_row, scratch);
  }
  for (int m = 0; m < num_members; ++m) {
    StoreResult<kType>(batch, item, members[m], partials, *scratch);
  }
}

// Merges the splits of each packed row in split order.
template <DType kType>
HWY_INLINE void CombineTyped(const AttentionBatch& batch, const CombineItem& item,
                             const Partials& partials, Scratch* scratch) {
  const FloatTag d;
  const int head_dim = batch.geometry.head_dim;
  for (int r = 0; r < item.row_count; ++r) {
    const auto split_row = [&](int s) { return item.first_partial_row + s * item.row_count + r; };
    float max = kNoScore;
    for (int s = 0; s < item.num_splits; ++s) max = std::max(max, partials.max[split_row(s)]);
    const float base = max == kNoScore ? 0.0f : max;
    float sum = 0;
    float* output = scratch->output;
    std::fill_n(output, head_dim, 0.0f);
    for (int s = 0; s < item.num_splits; ++s) {
      const int32_t row = split_row(s);
      const VecF weight = Exp2(d, hn::Set(d, partials.max[row] - base));
      sum += partials.sum[row] * hn::GetLane(weight);
      for (int c = 0; c < head_dim; c += kLanes) {
        const VecF part = hn::LoadU(d, partials.OutputRow(row) + c);
        hn::Store(hn::MulAdd(part, weight, hn::Load(d, output + c)), d, output + c);
      }
    }
    WriteRow<kType>(batch, item.span, item.kv_head, item.row_begin + r, output, max, sum);
  }
}

void AttendItem(const AttentionBatch& batch, const Plan& plan, const WorkItem& item,
                const Partials& partials, Scratch* scratch) {
  if (batch.geometry.dtype == DType::kFloat16) {
    AttendItemTyped<DType::kFloat16>(batch, plan, item, partials, scratch);
  } else {
    AttendItemTyped<DType::kBFloat16>(batch, plan, item, partials, scratch);
  }
}

void CombineItemSplits(const AttentionBatch& batch, const CombineItem& item,
                       const Partials& partials, Scratch* scratch) {
  if (batch.geometry.dtype == DType::kFloat16) {
    CombineTyped<DType::kFloat16>(batch, item, partials, scratch);
  } else {
    CombineTyped<DType::kBFloat16>(batch, item, partials, scratch);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
