// SequenceStore: which K/V a launch's sequences will read next.
#include <algorithm>

#include "kernels/plan.h"
#include "server/kv/sequence_store.h"

namespace flashcore::server {
namespace {

// Spans of more query rows are no decode: their K/V is read by several tiles, and the next layer's
// is far off.
constexpr uint32_t kMaxDecodeRows = 16;

}  // namespace

// Decode walks the layers of its sequences in order, so it will read the layer behind. What the L2
// window keeps, and what another span of the launch has named already, is left out.
void SequenceStore::AddNextRead(const AttendOperation& operation, size_t span, Sequence* sequence,
                                Launch* launch) {
  const AttendRequest& request = operation.request;
  const uint32_t query_rows = request.spans[span].query_rows;
  if (request.layer + 1 >= sequence->layers.size() || query_rows > kMaxDecodeRows) return;
  SequenceLayer& layer = sequence->layers[request.layer + 1];
  const auto rows = static_cast<int32_t>(query_rows);
  const kernels::KvRange seen =
      kernels::VisibleKv(request.mask, rows, static_cast<int32_t>(layer.length), 0, rows);
  const size_t max_pages = options_.prefetch_bytes / sequence->shape.page_bytes();
  PageRange pages;
  for (auto t = static_cast<size_t>(seen.begin / kernels::kPageTokens);
       t < static_cast<size_t>(kernels::PagesFor(seen.end)); ++t) {
    if (launch->next_pages.size() >= max_pages) break;
    const PageId page = layer.pages[t];
    if (arena_.segment(page) == Segment::kHot) continue;
    if (arena_.refs(page) > 1 && !next_shared_.insert(page).second) continue;
    launch->next_pages.push_back(arena_.place(page));
    if (pages.end == 0) pages.begin = t;
    pages.end = t + 1;
  }
  if (pages.end > 0) launch->next_reads.push_back({&layer, pages});
}

void SequenceStore::EndPrefetch(const Launch& launch) {
  if (!launch.prefetched) return;
  for (const Launch::NextRead& read : launch.next_reads) read.layer->prefetched = read.pages;
  metrics_->prefetched_bytes.Increment(launch.next_pages.size() *
                                       static_cast<size_t>(launch.page_layout().page_bytes()));
}

}  // namespace flashcore::server
