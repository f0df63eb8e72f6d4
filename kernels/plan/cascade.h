// Cascade items: spans that share leading pages share items. Only for kernels/plan.
#ifndef FLASHCORE_KERNELS_PLAN_CASCADE_H_
#define FLASHCORE_KERNELS_PLAN_CASCADE_H_

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

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
using CascadeCandidates = std::vector<CascadeCandidate>;

// The sorted candidates of a batch; none if sharing does not pay. Sets which spans share.
CascadeCandidates FindCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options,
                                     int32_t workers, Plan::Scratch* spans);

// Replaces items for the same pages by cascade items. Changes only the items: splits, partial rows
// and combines stay as each span alone has them.
void ShareCommonPrefixes(const AttentionBatch& batch, const PlanOptions& options, int32_t workers,
                         CascadeCandidates* candidates, Plan* plan);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_CASCADE_H_
