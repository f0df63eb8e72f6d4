// The lengths of splits (SplitRows in kernels/plan.h). Only for kernels/plan.
#ifndef FLASHCORE_KERNELS_PLAN_SPLITS_H_
#define FLASHCORE_KERNELS_PLAN_SPLITS_H_

#include <cstdint>

#include "kernels/plan.h"
#include "kernels/plan/tiles.h"

namespace flashcore::kernels {

// Whether a span of so many packed rows, if it is split, may have runs.
inline bool MayHaveRuns(const PlanOptions& options, int32_t span_rows) {
  if (IsSmall(span_rows)) return options.has_small_runs;
  return options.has_runs && span_rows > options.tile_rows / 2;
}

// K/V rows of the shortest split of a span of so many packed rows, if it has no runs.
inline int32_t UsualSplitRows(const PlanOptions& options, int32_t span_rows) {
  return options.split_kv_rows * options.costs->tiles[options.costs->KindOf(span_rows)].split_units;
}

// The cost of a split's partial results, in K/V rows.
inline int32_t CostOfResults(const PlanOptions& options, int32_t usual_split_rows) {
  return static_cast<int32_t>(usual_split_rows * options.costs->results);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_SPLITS_H_
