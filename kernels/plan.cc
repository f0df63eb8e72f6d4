#include "kernels/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace flashcore::kernels {
namespace {

int32_t DivideUp(int32_t a, int32_t b) {
  return a / b + (a % b != 0);  // NOLINT(clang-analyzer-core.DivideZero): b is a tile's rows
}

// Items that run at a time on all workers.
int64_t Places(const PlanOptions& options, int32_t workers) {
  return int64_t{workers} * std::max(1, options.items_per_worker);
}

// KV heads that have items of their own.
int32_t PlannedHeads(const AttentionBatch& batch, const PlanOptions& options) {
  return options.item_per_kv_head ? batch.geometry.num_kv_heads : 1;
}

// Whether the span's slices have KV head `head` of a tile that begins at `row_begin`.
bool HasSlice(const AttentionBatch& batch, const PlanOptions& options, const Span& span,
              int32_t row_begin, int32_t head) {
  // Without items per KV head, the first head speaks for all.
  const int32_t counted = options.item_per_kv_head ? head : 0;
  return span.slices.Contains(int64_t{row_begin / options.tile_rows} * batch.geometry.num_kv_heads +
                              counted);
}

// The K/V rows that are visible to the packed rows [row_begin, row_begin + row_count), from the
// first row of a page.
KvRange KvOfTile(const Span& span, int32_t group, int32_t row_begin, int32_t row_count) {
  KvRange kv = VisibleKv(span.mask, span.query_rows, span.kv.rows, row_begin / group,
                         (row_begin + row_count - 1) / group + 1);
  kv.begin = kv.begin / kPageTokens * kPageTokens;
  return kv;
}

// A tile of a span. Its splits have split_rows K/V rows.
struct Tile {
  int32_t span = 0;
  int32_t tile_rows = 0;  // as in WorkItem
  int32_t split_rows = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  bool has_runs = false;  // its items are runs, and not splits
};

// Plans a tile for the KV heads of its span, as far as they are in its slices.
void PlanTile(const AttentionBatch& batch, const PlanOptions& options, const Tile& tile,
              Plan* plan) {
  const auto& [span_index, tile_rows, split_rows, row_begin, row_count, has_runs] = tile;
  const Span& span = batch.spans[span_index];
  const KvRange kv = KvOfTile(span, batch.geometry.group(), row_begin, row_count);
  const int32_t splits = DivideUp(kv.end - kv.begin, split_rows);
  const int32_t run_splits = RunSplits(span.query_rows * batch.geometry.group());
  const int32_t item_splits = has_runs ? run_splits : 1;
  const int32_t parts = std::max(1, DivideUp(splits, item_splits));

  // Written in place: a copy of what was just written in parts waits for it.
  for (int32_t head = 0; head < batch.geometry.num_kv_heads; ++head) {
    if (!HasSlice(batch, options, span, row_begin, head)) continue;
    int32_t partial_row = splits > 1 ? plan->partial_rows : -1;
    const int32_t combine_index = parts > 1 ? static_cast<int32_t>(plan->combines.size()) : -1;
    if (parts > 1) {
      CombineItem& combine = plan->combines.emplace_back();
      combine.span = span_index;
      combine.kv_head = head;
      combine.row_begin = row_begin;
      combine.row_count = row_count;
      combine.first_partial_row = partial_row;
      combine.num_parts = parts;
      combine.run_parts = run_splits / item_splits;
      combine.tile_rows = tile_rows;
    }
    if (splits > 1) plan->partial_rows += parts * row_count;
    if (head > 0 && !options.item_per_kv_head) continue;
    int32_t kv_begin = kv.begin;
    for (int32_t part = 0; part < parts; ++part) {
      WorkItem& item = plan->items.emplace_back();
      item.span = span_index;
      item.kv_head = head;
      item.row_begin = row_begin;
      item.row_count = row_count;
      item.kv_begin = kv_begin;
      // Not beyond the end, which the largest integer is close to.
      const int64_t item_rows = int64_t{split_rows} * item_splits;
      item.kv_end = static_cast<int32_t>(std::min<int64_t>(kv.end, kv_begin + item_rows));
      item.split_rows = split_rows;
      item.partial_row = partial_row;
      item.combine = combine_index;
      item.tile_rows = tile_rows;
      kv_begin = item.kv_end;
      partial_row += row_count;
    }
  }
}

// Packed rows [begin, end) of the tiles that have any of the span's slices.
std::pair<int32_t, int32_t> RowsToPlan(const AttentionBatch& batch, const PlanOptions& options,
                                       const Span& span) {
  const int64_t heads = batch.geometry.num_kv_heads;
  const int64_t rows = int64_t{span.query_rows} * batch.geometry.group();
  const int64_t tiles = (rows + options.tile_rows - 1) / options.tile_rows;
  const int64_t begin = std::min(span.slices.begin / heads, tiles);
  const int64_t end =
      span.slices.end > tiles * heads ? tiles : (span.slices.end + heads - 1) / heads;
  return {static_cast<int32_t>(begin * options.tile_rows),
          static_cast<int32_t>(std::min(rows, end * options.tile_rows))};
}

// Rows of the block that attends a span of span_rows in tiles of tile_rows.
int32_t BlockRows(int32_t tile_rows, int32_t span_rows) {
  int32_t rows = kLeastTileRows;
  while (rows < tile_rows && rows < span_rows) rows *= 2;
  return rows;
}

// Time of a block of `rows` where all places run one, relative to the rows: fewer of them share a
// copy of K and V. Measured on an H100: 64 rows 0.97 to 1.07 times as long for each row at head_dim
// 128 and 64, 32 rows 1.35 to 1.6.
double BlockTime(int32_t rows) { return rows * (rows >= 128 ? 1 : rows >= 64 ? 8.0 / 7 : 1.5); }

// Time of `blocks` blocks of `rows`, each of which takes `time` where all places run one: rounds of
// all places. A block that has a worker for itself is faster. Measured on an H100, it takes 0.57 of
// that time with 128 rows, 0.68 with 64 and 0.81 with 32.
double TimeOfBlocks(double blocks, int32_t rows, double time, const PlanOptions& options,
                    int32_t workers) {
  if (blocks > workers || options.items_per_worker < 2) {
    return std::ceil(blocks / static_cast<double>(Places(options, workers))) * time;
  }
  return time * (rows >= 128 ? 0.6 : rows >= 64 ? 2.0 / 3 : 0.8);
}

// Tile size for the spans that are split, or for those that are not: the one with which they are
// done first. Blocks are counted in those of the longest.
int32_t TileRows(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                 const std::vector<int32_t>& split_rows, bool split) {
  int32_t best = options.tile_rows;
  if (!options.halves_tiles) return best;
  double least_time = std::numeric_limits<double>::infinity();
  for (int32_t rows = options.tile_rows; rows >= kLeastTileRows; rows /= 2) {
    double all = 0, longest = 0;
    int32_t longest_rows = 0;
    bool can_halve = false;
    for (int32_t s = 0; s < batch.num_spans; ++s) {
      const Span& span = batch.spans[s];
      const int32_t span_rows = span.query_rows * batch.geometry.group();
      if ((split_rows[s] != kUnsplit) != split || span_rows == 0) continue;
      const int32_t block_rows = BlockRows(rows, span_rows);
      can_halve |= block_rows > kLeastTileRows;
      // Spans without splits count as equally long.
      const double row_time = BlockTime(block_rows);
      const double time = row_time * (split ? split_rows[s] : 1);
      all += row_time * (split ? span.kv.rows : 1) * DivideUp(span_rows, rows) *
             batch.geometry.num_kv_heads;
      if (time > longest) {
        longest = time;
        longest_rows = block_rows;
      }
    }
    if (rows == options.tile_rows && !can_halve) return best;
    const double time = TimeOfBlocks(all / longest, longest_rows, longest, options, workers);
    if (time < least_time) {
      least_time = time;
      best = rows;
    }
  }
  return best;
}

bool IsSmall(int32_t span_rows) { return span_rows <= kSmallSpanRows; }

// Whether a span of so many packed rows, if it is split, may have runs.
bool MayHaveRuns(const PlanOptions& options, int32_t span_rows) {
  if (IsSmall(span_rows)) return options.has_small_runs;
  return options.has_runs && span_rows > options.tile_rows / 2;
}

// K/V rows of the shortest split of a span of so many packed rows, if it has no runs. The more
// packed rows read a K/V row, the more partial results a split has.
int32_t UsualSplitRows(const PlanOptions& options, int32_t span_rows) {
  return options.split_kv_rows * (IsSmall(span_rows) ? 1 : span_rows <= 64 ? 2 : 4);
}

// What the partial results of a split cost, in K/V rows.
int32_t CostOfResults(int32_t usual_split_rows) { return usual_split_rows / 4; }

// The share of it that a split of a run costs. On an H100, 0.26 to 0.3 takes the faster of runs and
// splits, or one that is 1% slower, in all batches that were measured but one.
constexpr double kCostInRun = 0.27;

// Splits of spans that are not small have a multiple of so many K/V rows. Two tiles: for as many in
// both streams of a block.
constexpr int32_t kSplitUnit = 2 * kPageTokens;

// Whether the span's rows have the same bits in halved tiles. The splits of a tile are counted from
// its first visible K/V row, which with a window depends on the tile.
bool MayHalve(const Span& span, const PlanOptions& options, bool split) {
  return options.halves_tiles && (!split || span.mask.left == Mask::kUnbounded);
}

// Which tiles of small spans, or of all others, have runs: those of the first spans, up to a share
// of the work that keeps all workers busy to the end. Small spans wait for memory, and have the
// workers beside the others.
class RunBudget {
 public:
  RunBudget(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
            const Plan::Scratch& spans, bool small)
      : options_(options),
        spans_(spans),
        heads_(batch.geometry.num_kv_heads),
        group_(batch.geometry.group()),
        small_(small) {
    int64_t all = 0, without = 0, longest = 0;
    Split split;  // the longest
    int32_t most_rows = 0;
    for (int32_t s = 0; s < batch.num_spans; ++s) {
      const int32_t rows = batch.spans[s].query_rows * group_;
      if (rows == 0 || (small && !IsSmall(rows))) continue;
      most_rows = std::max(most_rows, rows);
      const KvRange kv = KvOfTile(batch.spans[s], group_, 0, rows);
      const int32_t tiles = DivideUp(rows, options.tile_rows);
      const int64_t work = heads_ * tiles * Work(rows, kv.end - kv.begin);
      all += work;
      if (MayHaveRuns(s, rows)) {
        const int64_t run_rows = int64_t{spans.split_rows[s]} * RunSplits(rows);
        longest = std::max(longest, Work(rows, std::min<int64_t>(run_rows, kv.end - kv.begin)));
        const int64_t split_work = Work(rows, spans.split_rows[s]);
        if (split_work > split.work) {
          split.work = split_work;
          split.results = Work(rows, CostOfResults(UsualSplitRows(options, rows)));
          split.block_rows = BlockRows(options.tile_rows, rows);
        }
      } else {
        without += work;
      }
    }
    if (longest == 0) return;
    if (!small && all <= longest * workers) {
      if (AreFaster(all, longest, split, workers)) left_ = all - without;
      return;
    }
    // All places of the workers take the longest run, round by round. If the runs of the last round
    // would leave an eighth of all rounds' time idle, splits fill it instead. Small runs wait for
    // memory, and where more run on a worker than usual, the usual number reads as fast, and splits
    // pay from a sixteenth.
    const int64_t usual = Places(options, workers);
    const int32_t most = options.smallest_runs_per_worker;
    const bool has_most = most > 0 && most_rows <= kSmallestSpanRows;
    const int64_t places = has_most ? int64_t{most} * workers : usual;
    const int64_t parts = has_most ? 16 : 8;  // of all rounds' time
    const int64_t round = longest * places;
    const int64_t full = longest * std::min(places, usual);
    const int64_t rounds = all / round;
    const bool last_is_full = (all - rounds * round) * parts >= full * (parts - 1 - rounds);
    left_ = (last_is_full ? all : rounds * round) - without;
  }

  // Whether there are runs at all.
  bool Any() const { return left_ > 0; }

  // Whether the span's tile has runs. Takes its work from what is left.
  bool Take(const Span& span, const Tile& tile) {
    if (left_ <= 0 || !MayHaveRuns(tile.span, span.query_rows * group_)) return false;
    const KvRange kv = KvOfTile(span, group_, tile.row_begin, tile.row_count);
    left_ -= heads_ * Work(tile.tile_rows, kv.end - kv.begin);
    return left_ >= 0;
  }

 private:
  bool MayHaveRuns(int32_t span, int32_t span_rows) const {
    return IsSmall(span_rows) == small_ && spans_.split_rows[span] != kUnsplit &&
           !spans_.shares[span] && kernels::MayHaveRuns(options_, span_rows);
  }

  // A split without a run.
  struct Split {
    int64_t work = 0;
    int64_t results = 0;  // the cost of its partial results, as work
    int32_t block_rows = 0;
  };

  // Whether `all` work takes less time in runs, each of which has a worker for itself, than in
  // splits: a block alone on a worker is faster, and has less to do with partial results.
  bool AreFaster(int64_t all, int64_t longest_run, const Split& longest_split,
                 int32_t workers) const {
    const auto time_of = [&](int64_t block, double results) {
      const auto work = static_cast<double>(block);
      const double blocks = static_cast<double>(all) / work;
      return TimeOfBlocks(blocks, longest_split.block_rows, work + results, options_, workers);
    };
    const auto results = static_cast<double>(longest_split.results);
    const double splits =
        static_cast<double>(longest_run) / static_cast<double>(longest_split.work);
    return time_of(longest_run, splits * kCostInRun * results) <
           time_of(longest_split.work, results);
  }

  // Of a tile, in packed rows of its block * K/V rows. rows: of its span, or of the span's largest
  // tile.
  int64_t Work(int32_t rows, int64_t kv_rows) const {
    return (IsSmall(rows) ? kSmallSpanRows : BlockRows(options_.tile_rows, rows)) * kv_rows;
  }

  const PlanOptions& options_;
  const Plan::Scratch& spans_;
  const int64_t heads_;
  const int32_t group_;
  const bool small_;
  int64_t left_ = 0;
};

// Work of an item, in packed rows * K/V rows. K/V rows count one more, so that of two items without
// K/V the one with more rows is longer.
int64_t Cost(const PlanOptions& options, const WorkItem& item) {
  const bool has_block = !options.item_per_kv_head && !item.IsCascade();
  const int32_t rows = has_block ? BlockRows(options.tile_rows, item.tile_rows) : item.row_count;
  return int64_t{rows} * (int64_t{item.kv_end} - item.kv_begin + 1);
}

bool IsBeforeInBatch(const WorkItem& a, const WorkItem& b) {
  return std::tie(a.span, a.kv_head, a.row_begin, a.kv_begin) <
         std::tie(b.span, b.kv_head, b.row_begin, b.kv_begin);
}

// Longest first, so that the last items to start are the shortest. Ties go by place in the batch,
// which makes the order a pure function of the batch.
//
// Items are planned in the order of their places, unless a span has several tiles of several KV
// heads. In a decode, nearly all are whole splits of the same length: only the others are sorted.
void SortItems(const PlanOptions& options, Plan* plan) {
  if (!std::is_sorted(plan->items.begin(), plan->items.end(), IsBeforeInBatch)) {
    std::sort(plan->items.begin(), plan->items.end(), [&](const WorkItem& a, const WorkItem& b) {
      const int64_t cost_a = Cost(options, a), cost_b = Cost(options, b);
      return cost_a != cost_b ? cost_a > cost_b : IsBeforeInBatch(a, b);
    });
    return;
  }
  std::vector<WorkItem>& planned = plan->scratch.items;
  planned.swap(plan->items);
  plan->items.clear();
  int64_t longest = 0;
  for (const WorkItem& item : planned) longest = std::max(longest, Cost(options, item));
  auto& shorter = plan->scratch.order;  // the negative cost, and the place in `planned`
  shorter.clear();
  for (size_t i = 0; i < planned.size(); ++i) {
    const int64_t cost = Cost(options, planned[i]);
    if (cost == longest) {
      plan->items.push_back(planned[i]);
    } else {
      shorter.emplace_back(-cost, i);
    }
  }
  std::sort(shorter.begin(), shorter.end());
  for (const auto& [cost, i] : shorter) plan->items.push_back(planned[i]);
}

// A span whose leading splits other spans could share: these splits are whole, paged, and visible
// to every packed row.
struct CascadeCandidate {
  const Span* span = nullptr;
  int32_t index = 0;       // of the span
  int32_t first_page = 0;  // span->kv.pages[0], copied here for sorting
  int32_t split_rows = 0;
  int32_t num_pages = 0;      // of the splits that could be shared
  int32_t splits = 0;         // all splits of a KV head
  int32_t rows = 0;           // packed rows of a KV head
  int32_t common_splits = 0;  // leading splits with the same pages as the next candidate's (sorted)
  // The last cascade items with this candidate as the first had so many spans, and these in the
  // plan: those of KV head 0, then those of the next.
  int32_t num_cascade_spans = 0;
  int32_t first_cascade_span = 0;
};
using Candidates = std::vector<CascadeCandidate>;

// Appends the span, whose splits have split_rows K/V rows, if it is a candidate. A span that is cut
// is none.
void AddCascadeCandidate(const AttentionBatch& batch, int32_t index, int32_t split_rows,
                         Candidates* candidates) {
  const Span& span = batch.spans[index];
  const int32_t rows = span.query_rows * batch.geometry.group();
  if (rows == 0 || !IsSmall(rows) || split_rows == kUnsplit) return;
  if (span.slices.begin > 0 || span.slices.end < batch.geometry.num_kv_heads) return;
  if (span.kv.pages == nullptr || span.mask.left != Mask::kUnbounded) return;
  // The fewest K/V rows are visible to the first query row, and the most to the last.
  const KvRange visible = VisibleKv(span.mask, span.query_rows, span.kv.rows, 0, 1);
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

// What spans that share items must have in common, beside pages: the memory that page numbers
// index, splits, packed rows and softmax_scale.
auto KindOf(const CascadeCandidate& candidate) {
  const KvView& kv = candidate.span->kv;
  const auto address = [](const auto* of) { return reinterpret_cast<uintptr_t>(of); };
  return std::make_tuple(address(kv.key), address(kv.value), kv.page_stride, kv.head_stride,
                         kv.row_stride, candidate.span->softmax_scale, candidate.split_rows,
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
int64_t CountCommonSplits(Candidates* candidates) {
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

// The sorted candidates of a batch; none if sharing does not pay. Sets which spans share.
Candidates FindCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options,
                              int32_t workers, Plan::Scratch* spans) {
  spans->shares.assign(batch.num_spans, false);
  Candidates candidates;
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

// Replaces items for the same pages by cascade items. Changes only the items: splits, partial rows
// and combines stay as each span alone has them.
void ShareCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                         Candidates* candidates, Plan* plan) {
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

}  // namespace

KvRange VisibleKv(const Mask& mask, int32_t query_rows, int32_t kv_rows, int32_t row_begin,
                  int32_t row_end) {
  if (row_begin >= row_end) return {};
  const int64_t offset = int64_t{kv_rows} - query_rows;
  const int64_t first = row_begin + offset;   // position of the first row
  const int64_t last = row_end - 1 + offset;  // position of the last row
  int64_t begin = 0;
  int64_t end = kv_rows;
  if (mask.left != Mask::kUnbounded) begin = std::max(begin, first - mask.left);
  if (mask.right != Mask::kUnbounded) end = std::min(end, last + mask.right + 1);
  if (begin >= end) return {};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

int32_t SplitRows(const Geometry& geometry, const Span& span, const PlanOptions& options,
                  int32_t workers) {
  constexpr int64_t kMaxWaves = 4;  // more gain nothing: the last wave is short already
  const int32_t rows = span.query_rows * geometry.group();
  if (rows > options.split_max_rows) return kUnsplit;
  if (options.items_per_worker == 0) return options.split_kv_rows;
  const int32_t usual = UsualSplitRows(options, rows);
  const int32_t shortest = !IsSmall(rows) && MayHaveRuns(options, rows) ? usual / 2 : usual;
  if (span.kv.rows <= shortest) return kUnsplit;

  int64_t all = 0;      // K/V rows that the tiles of a KV head read
  int32_t longest = 0;  // by one tile
  for (int32_t row = 0; row < rows; row += options.tile_rows) {
    const KvRange kv =
        KvOfTile(span, geometry.group(), row, std::min(options.tile_rows, rows - row));
    all += kv.end - kv.begin;
    longest = std::max(longest, kv.end - kv.begin);
  }
  if (longest <= std::max(shortest, 0)) return kUnsplit;
  // As many tiles of the longest have as much work.
  const int64_t tiles = (all + longest - 1) / longest * geometry.num_kv_heads;
  const int64_t places = Places(options, workers);
  const int32_t largest_rows = BlockRows(options.tile_rows, rows);
  // Time of the span alone in splits of so many K/V rows, in the tiles that are done first. Smaller
  // tiles read K/V more often.
  const auto time_of = [&](int64_t splits, double kv_rows) {
    const auto of_tile = [&](int32_t tile_rows) {
      const int64_t blocks = tiles * splits * (largest_rows / tile_rows);
      return TimeOfBlocks(static_cast<double>(blocks), tile_rows, BlockTime(tile_rows) * kv_rows,
                          options, workers);
    };
    double time = of_tile(largest_rows);
    if (!MayHalve(span, options, splits > 1)) return time;
    for (int32_t tile_rows = largest_rows / 2; tile_rows >= kLeastTileRows; tile_rows /= 2) {
      time = std::min(time, of_tile(tile_rows));
    }
    return time;
  };
  const int32_t unit = IsSmall(rows) ? options.split_kv_rows : kSplitUnit;
  const int32_t cost = CostOfResults(usual);
  int32_t best = kUnsplit;
  double least_time = time_of(1, longest);
  // Takes splits of at least `least` rows that take less than `time`.
  const auto take_faster = [&](int32_t least, double time) {
    const int32_t most_splits = DivideUp(longest, least);
    int32_t in_waves = 1;
    for (int64_t waves = 1; waves <= kMaxWaves && in_waves < most_splits; ++waves) {
      in_waves = static_cast<int32_t>(std::min<int64_t>(most_splits, waves * places / tiles));
      if (in_waves <= 1) continue;
      const int32_t units = DivideUp(DivideUp(longest, in_waves), unit);
      const int32_t split_rows = std::max(least, units * unit);
      const double of_splits = time_of(DivideUp(longest, split_rows), split_rows + cost);
      if (of_splits >= time) continue;
      least_time = time = of_splits;
      best = split_rows;
    }
  };
  take_faster(usual, least_time);
  // In a batch that fills the workers, adding the halves up in runs takes up to 18% more time.
  if (shortest < usual) take_faster(shortest, least_time / 1.2);
  return best;
}

void MakePlan(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
              Plan* plan) {
  plan->items.clear();
  plan->cascade_spans.clear();
  plan->combines.clear();
  plan->partial_rows = 0;
  Plan::Scratch& scratch = plan->scratch;
  const std::vector<int32_t>& split_rows = scratch.split_rows;
  scratch.split_rows.clear();
  scratch.first_item.clear();
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    scratch.split_rows.push_back(SplitRows(batch.geometry, batch.spans[s], options, workers));
  }
  Candidates candidates = FindCommonPrefixes(batch, options, workers, &scratch);
  RunBudget runs(batch, options, workers, scratch, /*small=*/false);
  RunBudget small_runs(batch, options, workers, scratch, /*small=*/true);
  const int32_t unsplit_tile_rows = TileRows(batch, options, workers, split_rows, false);
  const int32_t split_tile_rows =
      runs.Any() ? options.tile_rows : TileRows(batch, options, workers, split_rows, true);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    scratch.first_item.push_back(plan->items.size());
    const Span& span = batch.spans[s];
    const int32_t rows = span.query_rows * batch.geometry.group();
    const bool split = split_rows[s] != kUnsplit;
    int32_t tile_rows = options.tile_rows;
    if (MayHalve(span, options, split)) tile_rows = split ? split_tile_rows : unsplit_tile_rows;
    const auto [row_begin, row_end] = RowsToPlan(batch, options, span);
    for (int32_t row = row_begin; row < row_end; row += tile_rows) {
      const int32_t row_count = std::min(tile_rows, rows - row);
      Tile tile{s, std::min(tile_rows, rows), split_rows[s], row, row_count};
      tile.has_runs = runs.Take(span, tile) || small_runs.Take(span, tile);
      PlanTile(batch, options, tile, plan);
    }
  }
  ShareCommonPrefixes(batch, options, workers, &candidates, plan);
  SortItems(options, plan);
  plan->workspace_bytes =
      size_t{sizeof(float)} * plan->partial_rows * (batch.geometry.head_dim + 2);
}

}  // namespace flashcore::kernels
