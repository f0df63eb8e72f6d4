// Which tiles attend their splits in runs. Only for kernels/plan.
#ifndef FLASHCORE_KERNELS_PLAN_RUNS_H_
#define FLASHCORE_KERNELS_PLAN_RUNS_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/plan.h"
#include "kernels/plan/tiles.h"

namespace flashcore::kernels {

// Chooses which tiles of small spans, or of all others, use runs: the first spans, until the runs'
// share of the work would leave workers idle at the end. Small spans wait for memory, and have the
// workers beside the others.
class RunBudget {
 public:
  RunBudget(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
            const Plan::Scratch& spans, bool small);

  // Whether there are runs at all.
  bool Any() const { return left_ > 0; }

  // Whether the span's tile has runs. Takes its work from what is left.
  bool Take(const Span& span, const Tile& tile);

 private:
  // A split without a run.
  struct Split {
    int64_t work = 0;
    int64_t results = 0;  // the cost of its partial results, as work
    int block_kind = 0;
  };

  bool MayHaveRuns(int32_t span, int32_t span_rows) const;

  // Whether `all` work takes less time in runs, each of which has a worker for itself, than in
  // splits: a block alone on a worker is faster, and has less to do with partial results.
  bool AreFaster(int64_t all, int64_t longest_run, const Split& longest_split,
                 int32_t workers) const;

  // The work of a tile: packed rows of its block * K/V rows. `rows` are those of its span, or of
  // the span's largest tile.
  int64_t Work(int32_t rows, int64_t kv_rows) const;

  const PlanOptions& options_;
  const Plan::Scratch& spans_;
  const int64_t heads_;
  const int32_t group_;
  const bool small_;
  int64_t left_ = 0;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_RUNS_H_
