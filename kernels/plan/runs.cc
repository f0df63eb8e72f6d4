#include "kernels/plan/runs.h"

#include <algorithm>

#include "kernels/plan/splits.h"

namespace flashcore::kernels {

RunBudget::RunBudget(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
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
        split.results = Work(rows, CostOfResults(options, UsualSplitRows(options, rows)));
        split.block_kind = BlockKind(options, options.tile_rows, rows);
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

bool RunBudget::Take(const Span& span, const Tile& tile) {
  if (left_ <= 0 || !MayHaveRuns(tile.span, span.query_rows * group_)) return false;
  const KvRange kv = KvOfTile(span, group_, tile.row_begin, tile.row_count);
  left_ -= heads_ * Work(tile.tile_rows, kv.end - kv.begin);
  return left_ >= 0;
}

bool RunBudget::MayHaveRuns(int32_t span, int32_t span_rows) const {
  return IsSmall(span_rows) == small_ && spans_.split_rows[span] != kUnsplit &&
         !spans_.shares[span] && kernels::MayHaveRuns(options_, span_rows);
}

bool RunBudget::AreFaster(int64_t all, int64_t longest_run, const Split& longest_split,
                          int32_t workers) const {
  const auto time_of = [&](int64_t block, double results) {
    const auto work = static_cast<double>(block);
    const double blocks = static_cast<double>(all) / work;
    return TimeOfBlocks(blocks, options_.costs->tiles[longest_split.block_kind], work + results,
                        options_, workers);
  };
  const auto results = static_cast<double>(longest_split.results);
  const double splits = static_cast<double>(longest_run) / static_cast<double>(longest_split.work);
  return time_of(longest_run, splits * options_.costs->results_in_run * results) <
         time_of(longest_split.work, results);
}

int64_t RunBudget::Work(int32_t rows, int64_t kv_rows) const {
  return (IsSmall(rows) ? kSmallSpanRows : BlockRows(options_, options_.tile_rows, rows)) * kv_rows;
}

}  // namespace flashcore::kernels
