#include "kernels/plan_cache.h"

#include <algorithm>
#include <tuple>

namespace flashcore::kernels {
namespace {

auto Values(const PlanOptions& o) {
  return std::make_tuple(o.tile_rows, o.split_kv_rows, o.split_max_rows, o.items_per_worker,
                         o.cascade_rows, o.cascade_saving, o.halves_tiles, o.item_per_kv_head,
                         o.has_runs, o.has_small_runs, o.smallest_runs_per_worker, o.costs);
}

}  // namespace

PlanCache::SpanKey PlanCache::KeyOf(const Span& span) {
  return {span.query_rows, span.kv.rows, span.kv.pages != nullptr, span.terms.mask, span.slices};
}

bool PlanCache::IsOf(const Entry& entry, const AttentionBatch& batch, const PlanOptions& options,
                     int32_t workers) {
  return entry.workers == workers && entry.geometry == batch.geometry &&
         entry.spans.size() == static_cast<size_t>(batch.num_spans) &&
         Values(entry.options) == Values(options) &&
         std::equal(entry.spans.begin(), entry.spans.end(), batch.spans,
                    [](const SpanKey& key, const Span& span) { return key == KeyOf(span); });
}

// Whether two spans may share items: a shared prefix begins with the first page of both.
bool PlanCache::MaySharePages(const AttentionBatch& batch, const PlanOptions& options) {
  if (options.cascade_rows == 0) return false;
  first_pages_.clear();
  for (const Span* span = batch.spans; span != batch.spans + batch.num_spans; ++span) {
    if (span->kv.pages == nullptr || span->kv.rows < options.split_kv_rows) continue;
    first_pages_.push_back(span->kv.pages[0]);
  }
  std::sort(first_pages_.begin(), first_pages_.end());
  return std::adjacent_find(first_pages_.begin(), first_pages_.end()) != first_pages_.end();
}

const Plan& PlanCache::Get(const AttentionBatch& batch, const PlanOptions& options,
                           int32_t workers) {
  ++calls_;
  const bool keep = !MaySharePages(batch, options);
  Entry* oldest = entries_.data();
  for (Entry& entry : entries_) {
    if (keep && IsOf(entry, batch, options, workers)) {
      entry.last_used = calls_;
      ++reused_;
      return entry.plan;
    }
    if (entry.last_used < oldest->last_used) oldest = &entry;
  }
  Entry& entry = *oldest;
  MakePlan(batch, options, workers, &entry.plan);
  entry.last_used = calls_;
  entry.workers = 0;
  if (!keep) return entry.plan;
  entry.geometry = batch.geometry;
  entry.options = options;
  entry.workers = workers;
  entry.spans.clear();
  for (int32_t s = 0; s < batch.num_spans; ++s) entry.spans.push_back(KeyOf(batch.spans[s]));
  return entry.plan;
}

}  // namespace flashcore::kernels
