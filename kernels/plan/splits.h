// The lengths of splits (SplitRows in kernels/plan.h). Only for kernels/plan.
#ifndef FLASHCORE_KERNELS_PLAN_SPLITS_H_
#define FLASHCORE_KERNELS_PLAN_SPLITS_H_

#include <cstdint>

#include "kernels/plan.h"

namespace flashcore::kernels {

// Whether a span of so many packed rows, if it is split, may have runs.
bool MayHaveRuns(const PlanOptions& options, int32_t span_rows);

// K/V rows of the shortest split of a span of so many packed rows, if it has no runs.
int32_t UsualSplitRows(const PlanOptions& options, int32_t span_rows);

// What the partial results of a split cost, in K/V rows.
int32_t CostOfResults(const PlanOptions& options, int32_t usual_split_rows);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_SPLITS_H_
