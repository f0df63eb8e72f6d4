// The part of MakePlan that lets forks of one prefix share work items. It only rewrites the work
// list: where splits begin and end, partial rows and combines stay as each span alone has them.
#ifndef FLASHCORE_KERNELS_PLAN_FORKS_H_
#define FLASHCORE_KERNELS_PLAN_FORKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/plan.h"

namespace flashcore::kernels {

// A span whose leading KV splits other spans could share: each is whole, paged, and seen entirely
// by every packed row. The item of KV head h and split s is first_item + h * splits + s.
struct Fork {
  const KvView* kv = nullptr;
  int32_t first_page = 0;  // kv->pages[0], at hand for sorting
  int32_t num_pages = 0;   // of the splits that could be shared
  int32_t splits = 0;      // of a KV head, those that cannot be shared included
  int32_t rows = 0;        // packed rows of a KV head
  size_t first_item = 0;
  int32_t shared_splits = 0;  // leading splits of the same pages as the next fork's, once sorted
};

// Adds the span whose items, not sorted yet, are plan.items[first_item...] to `*forks` if it is
// one.
void AddFork(const AttentionBatch& batch, const PlanOptions& options, const Plan& plan,
             size_t first_item, std::vector<Fork>* forks);

// Replaces items of `*plan` for the same pages by shared ones, as far as it pays.
void ShareItems(const Geometry& geometry, const PlanOptions& options, int32_t workers,
                std::vector<Fork>* forks, Plan* plan);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_FORKS_H_
