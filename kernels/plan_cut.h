// Cuts the work of a batch into parts, each for a launch of bounded time. All parts together write
// every output once, with the bits of one launch.
//
// A part is a run of slices (SliceRange): span by span, in a span tile by tile, in a tile KV head
// by KV head. A slice is never cut, so a part can be longer than asked for: a tile reads all K/V
// rows that are visible to it.
#ifndef FLASHCORE_KERNELS_PLAN_CUT_H_
#define FLASHCORE_KERNELS_PLAN_CUT_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// A place between two slices: before slice `slice` of span `span`.
struct CutPoint {
  int32_t span = 0;
  int64_t slice = 0;
};

// The slices from `begin` up to `end`. By default all of a batch.
struct BatchPart {
  CutPoint begin;
  CutPoint end = {std::numeric_limits<int32_t>::max(), 0};

  SliceRange SlicesOf(int32_t span) const;
};

struct CutOptions {
  // Work of a part, in floating-point operations of what the masks leave visible. A part has a
  // little less, so that all parts are about equal, or more: up to a whole slice, and up to one for
  // each worker if they have few, because that takes no longer.
  double max_flop = 0;
  // A slice counts at least as many packed rows: with fewer, it is bound by reading K/V.
  double min_rows = 1;
};

// The parts of `batch`, whose spans are whole, in their order; at least one. `options` and
// `workers` are those of MakePlan. If the kernel has no items per KV head, a part begins and ends
// at whole query rows, with all their heads.
std::vector<BatchPart> CutBatch(const AttentionBatch& batch, const PlanOptions& options,
                                int32_t workers, const CutOptions& cut);

// Query rows [begin, end).
struct RowRange {
  int32_t begin = 0;
  int32_t end = 0;
};

// The query rows that a part writes of a span, for a part of whole query rows.
RowRange QueryRowsOf(const Geometry& geometry, const PlanOptions& options, const Span& span);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_CUT_H_
