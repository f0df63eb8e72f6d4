// Keeps the plans of the last batches. The layers of a model take turns with the same spans over
// other pages: all of them have one plan.
#ifndef FLASHCORE_KERNELS_PLAN_CACHE_H_
#define FLASHCORE_KERNELS_PLAN_CACHE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Not thread-safe: each lane has one.
class PlanCache {
 public:
  // The plan that MakePlan makes. Valid until the next call.
  //
  // A plan is reused if all that MakePlan reads is equal, compared value by value. Page tables are
  // read only to find spans that share a prefix: such a batch is planned anew each time.
  const Plan& Get(const AttentionBatch& batch, const PlanOptions& options, int32_t workers);

  int64_t reused() const { return reused_; }  // answers that were not planned anew

 private:
  static constexpr size_t kEntries = 4;  // several requests of a model take turns

  // MakePlan's input from a span.
  struct SpanKey {
    int32_t query_rows = 0;
    int32_t kv_rows = 0;
    bool paged = false;
    Mask mask;  // other terms are read only to find spans that share a prefix
    SliceRange slices;

    friend bool operator==(const SpanKey& a, const SpanKey& b) {
      return a.query_rows == b.query_rows && a.kv_rows == b.kv_rows && a.paged == b.paged &&
             a.mask == b.mask && a.slices.begin == b.slices.begin && a.slices.end == b.slices.end;
    }
  };

  struct Entry {
    Geometry geometry;
    PlanOptions options;
    int32_t workers = 0;         // 0: the entry is empty
    std::vector<SpanKey> spans;  // [num_spans]
    Plan plan;
    uint64_t last_used = 0;  // number of the call
  };

  static SpanKey KeyOf(const Span& span);
  static bool IsOf(const Entry& entry, const AttentionBatch& batch, const PlanOptions& options,
                   int32_t workers);
  bool MaySharePages(const AttentionBatch& batch, const PlanOptions& options);

  std::array<Entry, kEntries> entries_;
  std::vector<int32_t> first_pages_;  // scratch
  uint64_t calls_ = 0;
  int64_t reused_ = 0;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_CACHE_H_
