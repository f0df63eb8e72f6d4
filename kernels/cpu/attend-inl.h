// One work item of fused attention, from its query rows to its output rows. Included once per SIMD
// target.
//
// For each K/V tile of 64 tokens: scores S = Q K^T; online softmax turns S into probabilities P;
// O = O * rescale + P V. Only one tile of scores exists at a time. Three ways to read a tile:
//
//   item                      Q K^T                          P V
//   more than 16 packed rows  K to float32, transposed       V to float32 in scratch
//   at most 16 (decode)       dot products along K rows,     V rows in K/V memory
//                             read in K/V memory
//   cascade, more than 16     dot products, K to float32     V to float32 in scratch
//
// Few rows read K/V in place, because converting a tile costs more than multiplying it. A cascade
// item keeps dot products, because a row must be summed in the order that its span alone uses.
#if defined(FLASHCORE_KERNELS_CPU_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#undef FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#else
#define FLASHCORE_KERNELS_CPU_ATTEND_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/cpu/convert-inl.h"
#include "kernels/cpu/multiply-inl.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/tiles.h"
#include "kernels/plan.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

// A tile of K/V rows of one KV head, in K/V memory. Rows from `tokens` on are never read: they are
// beyond the span's length, or masked for every row of the item.
struct Tile {
  const std::byte* key;
  const std::byte* value;
  int tokens;
  int64_t row_stride;  // bytes
};

HWY_INLINE Tile TileAt(const KvView& kv, int32_t kv_head, int32_t kv_row, int32_t kv_end) {
  const int32_t tile = kv_row / kPageTokens;
  const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
  const int64_t offset = page * kv.page_stride + kv_head * kv.head_stride;
  return {kv.key + offset, kv.value + offset, std::min(kPageTokens, kv_end - kv_row),
          kv.row_stride};
}

// The tokens of the tile at kv_row that are visible to a packed row of the span.
HWY_INLINE TokenRange VisibleTokens(const Span& span, int32_t group, int32_t packed_row,
                                    int32_t kv_row, int tokens) {
  const int64_t position = int64_t{packed_row / group} + span.kv.rows - span.query_rows - kv_row;
  int64_t begin = 0;
  int64_t end = tokens;
  if (span.terms.mask.left != Mask::kUnbounded) begin = position - span.terms.mask.left;
  if (span.terms.mask.right != Mask::kUnbounded) end = position + span.terms.mask.right + 1;
  return {static_cast<int>(std::clamp<int64_t>(begin, 0, tokens)),
          static_cast<int>(std::clamp<int64_t>(end, 0, tokens))};
}

// Whether scores are dot products along K rows. Otherwise they are products with a transposed K
// tile, which sum in another order.
HWY_INLINE bool ScoresAreDots(const WorkItem& item) {
  return item.IsCascade() || item.row_count <= kCpuFewRows;
}

// Converts packed query rows to scratch, multiplied by softmax_scale * log2(e).
template <DType kType>
HWY_INLINE void LoadQueryTyped(const AttentionBatch& batch, const WorkItem& item,
                               const CascadeSpan& part, Scratch* scratch) {
  const FloatTag d;
  const Span& span = batch.spans[part.span];
  const int32_t group = batch.geometry.group();
  const int32_t head_dim = batch.geometry.head_dim;
  const VecF scale = hn::Set(d, span.terms.softmax_scale * 1.44269504088896340736f);  // log2(e)
  for (int r = 0; r < part.row_count; ++r) {
    const int32_t row = item.row_begin + r;
    const int64_t head = int64_t{item.kv_head} * group + row % group;
    const std::byte* from = span.query + row / group * span.row_stride + head * span.head_stride;
    float* to = scratch->query + (part.tile_row + r) * head_dim;
    for (int c = 0; c < head_dim; c += kLanes) {
      const VecF query = LoadElements<ElementOf(kType)>(d, from + c * DTypeBytes(kType));
      hn::Store(hn::Mul(query, scale), d, to + c);
    }
  }
}

HWY_INLINE void LoadQuery(const AttentionBatch& batch, const WorkItem& item,
                          const CascadeSpan& part, Scratch* scratch) {
  if (batch.geometry.dtype == DType::kFloat16) {
    LoadQueryTyped<DType::kFloat16>(batch, item, part, scratch);
  } else {
    LoadQueryTyped<DType::kBFloat16>(batch, item, part, scratch);
  }
}

HWY_INLINE void ClearState(int rows, int head_dim, Scratch* scratch) {
  std::fill_n(scratch->output, rows * head_dim, 0.0f);
  std::fill_n(scratch->sum, rows * kMaxLanes, 0.0f);
  std::fill_n(scratch->max, rows, kNoScore);
}

// Converts rows of K or V to float32 rows of `to`, head_dim floats each.
template <Element kElement>
HWY_INLINE void ConvertRows(const std::byte* from, int64_t row_stride, int rows, int head_dim,
                            float* HWY_RESTRICT to) {
  const FloatTag d;
  const ElementRows<kElement> elements{from, row_stride};
  for (int j = 0; j < rows; ++j) {
    for (int c = 0; c < head_dim; c += kLanes) {
      hn::Store(elements.Load(j, c / kLanes), d, to + j * head_dim + c);
    }
  }
}

// Multiplies column j of the packed rows [first, last) of scratch->scores by the scale of row j of
// a tile of K or V, whose rows begin at `rows`. Columns of tokens beyond the tile's end get any
// value.
template <Element kElement>
HWY_INLINE void ScaleColumns(const std::byte* rows, int64_t row_stride, int first, int last,
                             Scratch* scratch) {
  const FloatTag d;
  const ElementRows<Element::kBFloat16> scales{rows + kPageTokens * row_stride, 0};
  for (int v = 0; v < kPageTokens / kLanes; ++v) {
    const VecF scale = hn::Mul(scales.Load(0, v), hn::Set(d, UnitOf(kElement)));
    for (int r = first; r < last; ++r) {
      float* const at = scratch->scores + r * kPageTokens + v * kLanes;
      hn::Store(hn::Mul(hn::Load(d, at), scale), d, at);
    }
  }
}

// Scores of the packed rows [first, last) against all 64 tokens of the tile, before the scales of
// K rows. Scores from tile.tokens on have no meaning; SoftmaxRow masks them.
template <Element kElement>
HWY_INLINE void TileScores(const Tile& tile, const NextTile& next, int head_dim, bool dots,
                           int first, int last, Scratch* scratch) {
  const float* query = scratch->query + first * head_dim;
  float* scores = scratch->scores + first * kPageTokens;
  const int count = last - first;
  if (dots && count > kCpuFewRows) {
    ConvertRows<kElement>(tile.key, tile.row_stride, tile.tokens, head_dim, scratch->key);
    DotScores(query, FloatRows{scratch->key, head_dim}, next, head_dim, scores, count);
    return;
  }
  const std::byte* rows[kPageTokens];
  for (int j = 0; j < kPageTokens; ++j) {
    rows[j] = j < tile.tokens ? tile.key + j * tile.row_stride : scratch->zeros;
  }
  if (dots) {
    DotScores(query, ScatteredRows<kElement>{rows}, next, head_dim, scores, count);
    return;
  }
  TransposeKeys<kElement>(rows, head_dim, scratch->key);
  Multiply(query, head_dim, FloatRows{scratch->key, kPageTokens}, TokenRange{0, head_dim}, nullptr,
           nullptr, scores, kPageTokens, count, kPageTokens);
}

// O = O * rescale + P V for the packed rows [first, last). `visible` is null if the whole tile is
// visible to all of them; otherwise entry r belongs to row first + r. A row with P = 0 at a masked
// token may still multiply that V row, so V must be finite.
template <Element kElement>
HWY_INLINE void TileOutput(const Tile& tile, int head_dim, int first, int last,
                           const TokenRange* visible, Scratch* scratch) {
  const float* probabilities = scratch->scores + first * kPageTokens;
  const float* rescale = scratch->rescale + first;
  float* output = scratch->output + first * head_dim;
  const TokenRange all{0, tile.tokens};
  if (last - first <= kCpuFewRows) {
    Multiply(probabilities, kPageTokens, ElementRows<kElement>{tile.value, tile.row_stride}, all,
             visible, rescale, output, head_dim, last - first, head_dim);
    return;
  }
  ConvertRows<kElement>(tile.value, tile.row_stride, tile.tokens, head_dim, scratch->value);
  Multiply(probabilities, kPageTokens, FloatRows{scratch->value, head_dim}, all, visible, rescale,
           output, head_dim, last - first, head_dim);
}

template <Element kElement>
HWY_INLINE void AttendTile(const AttentionBatch& batch, const WorkItem& item, int32_t kv_row,
                           Scratch* scratch) {
  const Span& span = batch.spans[item.span];
  const int32_t group = batch.geometry.group();
  const int head_dim = batch.geometry.head_dim;
  const Tile tile = TileAt(span.kv, item.kv_head, kv_row, item.kv_end);

  // Begins and ends never decrease from row to row. So if the last row's begin is 0 and the first
  // row's end is 64, the whole tile is visible to every row. In a cascade item it always is.
  const auto visible_to = [&](int r) {
    return VisibleTokens(span, group, item.row_begin + r, kv_row, tile.tokens);
  };
  int first = 0;
  int last = item.row_count;
  const bool masked =
      !item.IsCascade() && (visible_to(last - 1).begin > 0 || visible_to(0).end < kPageTokens);
  TokenRange visible[Scratch::kRows];
  if (masked) {
    for (int r = 0; r < item.row_count; ++r) visible[r] = visible_to(r);
    while (first < last && visible[first].begin >= visible[first].end) ++first;
    while (first < last && visible[last - 1].begin >= visible[last - 1].end) --last;
    if (first == last) return;
  }

  NextTile next;
  if (kv_row + kPageTokens < item.kv_end) {
    const Tile after = TileAt(span.kv, item.kv_head, kv_row + kPageTokens, item.kv_end);
    next = {after.key, after.value, after.row_stride, head_dim * ElementBytes(kElement)};
  }
  TileScores<kElement>(tile, next, head_dim, ScoresAreDots(item), first, last, scratch);
  if (IsCode(kElement)) ScaleColumns<kElement>(tile.key, tile.row_stride, first, last, scratch);
  for (int r = first; r < last; ++r) {
    if (masked) {
      SoftmaxRow<true>(r, visible[r], scratch);
    } else {
      SoftmaxRow<false>(r, {}, scratch);
    }
  }
  if (IsCode(kElement)) ScaleColumns<kElement>(tile.value, tile.row_stride, first, last, scratch);
  TileOutput<kElement>(tile, head_dim, first, last, masked ? visible + first : nullptr, scratch);
}

// O of one finished packed row in the batch's dtype: output * scale.
template <DType kType>
HWY_INLINE void WriteElements(const float* output, float scale, int head_dim, std::byte* to) {
  const FloatTag d;
  for (int c = 0; c < head_dim; c += kLanes) {
    StoreElements<kType>(d, hn::Mul(hn::LoadU(d, output + c), hn::Set(d, scale)),
                         reinterpret_cast<uint16_t*>(to) + c);
  }
}

// Writes one finished packed row: O / sum in the batch's dtype, and the LSE.
HWY_INLINE void WriteRow(const AttentionBatch& batch, int32_t span_index, int32_t kv_head,
                         int32_t packed_row, const float* output, float max, float sum) {
  const Span& span = batch.spans[span_index];
  const int32_t group = batch.geometry.group();
  const int64_t head = int64_t{kv_head} * group + packed_row % group;
  const int64_t row = packed_row / group;
  std::byte* to = span.output + row * span.row_stride + head * span.head_stride;
  const float scale = sum == 0 ? 0.0f : 1.0f / sum;
  if (batch.geometry.dtype == DType::kFloat16) {
    WriteElements<DType::kFloat16>(output, scale, batch.geometry.head_dim, to);
  } else {
    WriteElements<DType::kBFloat16>(output, scale, batch.geometry.head_dim, to);
  }
  if (span.lse != nullptr) {
    constexpr float kLn2 = 0.693147180559945309417f;
    span.lse[row * span.lse_row_stride + head * span.lse_head_stride] =
        sum == 0 ? kNoScore : max * kLn2 + std::log(sum);
  }
}

// Writes the rows of one span: to its partial rows from `partial_row` on, or if that is -1, to its
// O and LSE.
HWY_INLINE void StoreResult(const AttentionBatch& batch, const WorkItem& item,
                            const CascadeSpan& part, int32_t partial_row, const Partials& partials,
                            const Scratch& scratch) {
  const FloatTag d;
  const int head_dim = batch.geometry.head_dim;
  for (int r = 0; r < part.row_count; ++r) {
    const int at = part.tile_row + r;
    const float* output = scratch.output + at * head_dim;
    const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, scratch.sum + at * kMaxLanes)));
    if (partial_row < 0) {
      WriteRow(batch, part.span, item.kv_head, item.row_begin + r, output, scratch.max[at], sum);
    } else {
      const int32_t row = partial_row + r;
      std::copy_n(output, head_dim, partials.OutputRow(row));
      partials.max[row] = scratch.max[at];
      partials.sum[row] = sum;
    }
  }
}

template <Element kElement>
HWY_INLINE void AttendItemTyped(const AttentionBatch& batch, const Plan& plan, const WorkItem& item,
                                const Partials& partials, Scratch* scratch) {
  const CascadeSpan whole{item.span, 0, item.row_count};
  const bool cascade = item.IsCascade();
  const CascadeSpan* const parts =
      cascade ? plan.cascade_spans.data() + item.first_cascade_span : &whole;
  const int num_parts = cascade ? item.num_cascade_spans : 1;

  for (int p = 0; p < num_parts; ++p) LoadQuery(batch, item, parts[p], scratch);
  ClearState(item.row_count, batch.geometry.head_dim, scratch);
  for (int32_t kv_row = item.kv_begin; kv_row < item.kv_end; kv_row += kPageTokens) {
    AttendTile<kElement>(batch, item, kv_row, scratch);
  }
  for (int p = 0; p < num_parts; ++p) {
    const int32_t partial_row =
        cascade ? parts[p].PartialRow(item.CascadeSplit()) : item.partial_row;
    StoreResult(batch, item, parts[p], partial_row, partials, *scratch);
  }
}

void AttendItem(const AttentionBatch& batch, const Plan& plan, const WorkItem& item,
                const Partials& partials, Scratch* scratch) {
  if (batch.geometry.kv_dtype == KvDType::kInt8) {
    AttendItemTyped<Element::kInt8>(batch, plan, item, partials, scratch);
  } else if (batch.geometry.kv_dtype == KvDType::kFloat8E4M3) {
    AttendItemTyped<Element::kFloat8E4M3>(batch, plan, item, partials, scratch);
  } else if (batch.geometry.dtype == DType::kFloat16) {
    AttendItemTyped<Element::kFloat16>(batch, plan, item, partials, scratch);
  } else {
    AttendItemTyped<Element::kBFloat16>(batch, plan, item, partials, scratch);
  }
}

// Merges the splits of each packed row in split order. One in which the row sees nothing
// contributes nothing, whatever its output holds: NaN, if V has one.
void CombineItemSplits(const AttentionBatch& batch, const CombineItem& item,
                       const Partials& partials, Scratch* scratch) {
  const FloatTag d;
  const int head_dim = batch.geometry.head_dim;
  for (int r = 0; r < item.row_count; ++r) {
    const auto split_row = [&](int s) { return item.first_partial_row + s * item.row_count + r; };
    float max = kNoScore;
    for (int s = 0; s < item.num_parts; ++s) max = std::max(max, partials.max[split_row(s)]);
    float sum = 0;
    float* output = scratch->output;
    std::fill_n(output, head_dim, 0.0f);
    for (int s = 0; s < item.num_parts; ++s) {
      const int32_t row = split_row(s);
      if (partials.max[row] == kNoScore) continue;
      const VecF weight = Exp2(d, hn::Set(d, partials.max[row] - max));
      sum += partials.sum[row] * hn::GetLane(weight);
      for (int c = 0; c < head_dim; c += kLanes) {
        const VecF part = hn::LoadU(d, partials.OutputRow(row) + c);
        hn::Store(hn::MulAdd(part, weight, hn::Load(d, output + c)), d, output + c);
      }
    }
    WriteRow(batch, item.span, item.kv_head, item.row_begin + r, output, max, sum);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
