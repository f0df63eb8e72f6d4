#include "kernels/plan/cascade.h"

#include <algorithm>
#include <tuple>

#include "kernels/plan/tiles.h"

namespace flashcore::kernels {
namespace {

// Appends the span, whose splits have split_rows K/V rows, if it is a candidate. A span that is cut
// is none.
void AddCascadeCandidate(const AttentionBatch& batch, int32_t index, int32_t split_rows,
                         CascadeCandidates* candidates) {
  const Span& span = batch.spans[index];
  const int32_t rows = span.query_rows * batch.geometry.group();
  if (rows == 0 || !IsSmall(rows) || split_rows == kUnsplit) return;
  if (span.slices.begin > 0 || span.slices.end < batch.geometry.num_kv_heads) return;
  if (span.kv.pages == nullptr || span.terms.mask.left != Mask::kUnbounded) return;
  // The fewest K/V rows are visible to the first query row, and the most to the last.
  const KvRange visible = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, 0, 1);
  const int32_t whole_splits = visible.end / split_rows;
  if (whole_splits == 0) return;
  CascadeCandidate candidate;
  candidate.span = &span;
  candidate.index = index;
  candidate.first_page = span.kv.pages[0];
  candidate.split_rows = split_rows;
  candidate.num_pages = whole_splits * (split_rows / kPageTokens);
  candidate.splits = DivideUp(KvOfTile(span, batch.geometry.group(), 0, rows).end, split_rows);
  candidate.rows = rows;
  candidates->push_back(candidate);
}

// Spans that share items must agree, beside pages, in: the memory that page numbers index, splits,
// packed rows and all terms but the mask, which leaves a shared split visible to every row.
auto KindOf(const CascadeCandidate& candidate) {
  const KvView& kv = candidate.span->kv;
  const auto address = [](const auto* of) { return reinterpret_cast<uintptr_t>(of); };
  return std::make_tuple(address(kv.key), address(kv.value), kv.page_stride, kv.head_stride,
                         kv.row_stride, candidate.span->terms.score_terms(), candidate.split_rows,
                         candidate.rows);
}

// Number of leading pages that two candidates have in common.
int32_t CommonPages(const CascadeCandidate& a, const CascadeCandidate& b) {
  if (a.first_page != b.first_page || KindOf(a) != KindOf(b)) return 0;
  const int32_t pages = std::min(a.num_pages, b.num_pages);
  const int32_t* begin = a.span->kv.pages;
  return static_cast<int32_t>(std::mismatch(begin, begin + pages, b.span->kv.pages).first - begin);
}

// Lexicographic order of the page tables: candidates with a common prefix become neighbours, and
// two of them have in common what all neighbours between them have in common. The first page is
// compared first because it nearly always decides.
bool PagesLess(const CascadeCandidate& a, const CascadeCandidate& b) {
  if (a.first_page != b.first_page) return a.first_page < b.first_page;
  const auto a_kind = KindOf(a), b_kind = KindOf(b);
  if (a_kind != b_kind) return a_kind < b_kind;
  const int32_t common = CommonPages(a, b);
  if (common < std::min(a.num_pages, b.num_pages)) {
    return a.span->kv.pages[common] < b.span->kv.pages[common];
  }
  if (a.num_pages != b.num_pages) return a.num_pages < b.num_pages;
  return a.index < b.index;
}

// Sets common_splits of every sorted candidate. Returns the K/V rows that are read less, for a KV
// head, if each split is shared by all it can.
int64_t CountCommonSplits(CascadeCandidates* candidates) {
  int64_t kv_rows = 0;
  for (size_t c = 0; c + 1 < candidates->size(); ++c) {
    CascadeCandidate& candidate = (*candidates)[c];
    candidate.common_splits =
        CommonPages(candidate, (*candidates)[c + 1]) / (candidate.split_rows / kPageTokens);
    kv_rows += int64_t{candidate.common_splits} * candidate.split_rows;
  }
  return kv_rows;
}

// Largest cascade item such that none is more than one worker's share of the launch. Where a span
// alone is split to keep all workers busy (SplitRows), shared splits do, too.
int32_t MaxCascadeRows(const PlanOptions& options, int32_t workers, const Plan& plan) {
  if (options.items_per_worker > 0) return options.cascade_rows;
  int64_t work = 0;  // packed rows * K/V rows
  for (const WorkItem& item : plan.items) {
    work += int64_t{item.row_count} * (item.kv_end - item.kv_begin);
  }
  return static_cast<int32_t>(
      std::min<int64_t>(options.cascade_rows, work / workers / options.split_kv_rows));
}

// The item of a candidate, which has no runs.
WorkItem& ItemOf(const CascadeCandidate& candidate, int32_t head, int32_t split, Plan* plan) {
  return plan->items[plan->scratch.first_item[candidate.index] + head * candidate.splits + split];
}

// Adds the spans of the cascade items of `count` candidates from `first` on, for each KV head.
void AddCascadeSpans(CascadeCandidate* first, int32_t count, int32_t planned_heads, Plan* plan) {
  first->num_cascade_spans = count;
  first->first_cascade_span = static_cast<int32_t>(plan->cascade_spans.size());
  for (int32_t head = 0; head < planned_heads; ++head) {
    for (int32_t n = 0; n < count; ++n) {
      const WorkItem& item = ItemOf(first[n], head, 0, plan);
      const int32_t rows = first->rows;
      plan->cascade_spans.push_back({item.span, n * rows, rows, item.partial_row, item.combine});
      if (item.combine >= 0) plan->combines[item.combine].has_cascade = true;
    }
  }
}

// Merges the items that `count` candidates from `first` on have for a split, for each KV head. The
// first candidate's item becomes the cascade item; the others keep no rows.
void MergeItems(CascadeCandidate* first, int32_t count, int32_t split, int32_t planned_heads,
                Plan* plan) {
  if (first->num_cascade_spans != count) AddCascadeSpans(first, count, planned_heads, plan);
  for (int32_t head = 0; head < planned_heads; ++head) {
    for (int32_t n = 1; n < count; ++n) ItemOf(first[n], head, split, plan).row_count = 0;
    WorkItem& cascade = ItemOf(*first, head, split, plan);
    cascade.row_count = count * first->rows;
    cascade.first_cascade_span = first->first_cascade_span + head * count;
    cascade.num_cascade_spans = count;
  }
}

// Shares one split of the candidates [begin, end), which all have its pages in common: in as few
// items as max_rows allows, of about equal size.
void ShareSplit(CascadeCandidate* begin, int32_t count, int32_t split, int32_t planned_heads,
                int32_t max_rows, Plan* plan) {
  const int32_t most = max_rows / begin->rows;  // spans of an item
  if (most < 2) return;
  const int32_t of_an_item = DivideUp(count, DivideUp(count, most));
  for (int32_t n = 0; n < count; n += of_an_item) {
    const int32_t spans = std::min(of_an_item, count - n);
    if (spans > 1) MergeItems(begin + n, spans, split, planned_heads, plan);
  }
}

}  // namespace

CascadeCandidates FindCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options,
                                     int32_t workers, Plan::Scratch* spans) {
  spans->shares.assign(batch.num_spans, false);
  CascadeCandidates candidates;
  if (options.cascade_rows == 0) return candidates;
  candidates.reserve(batch.num_spans);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    AddCascadeCandidate(batch, s, spans->split_rows[s], &candidates);
  }
  std::sort(candidates.begin(), candidates.end(), PagesLess);
  const Geometry& geometry = batch.geometry;
  const int64_t saving = CountCommonSplits(&candidates) * geometry.num_kv_heads * geometry.head_dim;
  if (saving == 0 || saving < options.cascade_saving * workers) return {};
  for (size_t c = 0; c + 1 < candidates.size(); ++c) {
    if (candidates[c].common_splits == 0) continue;
    spans->shares[candidates[c].index] = spans->shares[candidates[c + 1].index] = true;
  }
  return candidates;
}

void ShareCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                         CascadeCandidates* candidates, Plan* plan) {
  if (candidates->empty()) return;
  const int32_t max_rows = MaxCascadeRows(options, workers, *plan);
  if (max_rows == 0) return;

  int32_t most = 0;  // splits that two spans have in common
  for (const CascadeCandidate& candidate : *candidates) {
    most = std::max(most, candidate.common_splits);
  }
  for (int32_t split = 0; split < most; ++split) {
    for (size_t begin = 0, end; begin < candidates->size(); begin = end) {
      end = begin + 1;
      while ((*candidates)[end - 1].common_splits > split) ++end;  // the last candidate has 0
      if (end - begin < 2) continue;
      ShareSplit(&(*candidates)[begin], static_cast<int32_t>(end - begin), split,
                 PlannedHeads(batch, options), max_rows, plan);
    }
  }
  const auto is_empty = [](const WorkItem& item) { return item.row_count == 0; };
  plan->items.erase(std::remove_if(plan->items.begin(), plan->items.end(), is_empty),
                    plan->items.end());
}

}  // namespace flashcore::kernels
