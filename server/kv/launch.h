// What one launch does, in terms that every device understands: pages to copy, rows to append, and
// the K/V to attend to.
#ifndef FLASHCORE_SERVER_KV_LAUNCH_H_
#define FLASHCORE_SERVER_KV_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention.h"
#include "kernels/kv_pages.h"
#include "server/request/request.h"

namespace flashcore::server {

// The K/V of a span that names a sequence: its pages are pages[first_page ...] of the launch.
struct ResidentKv {
  size_t first_page = 0;
  int32_t rows = 0;
};

// A device carries it out in this order: copies, appends, attention. Memory is reused from launch
// to launch.
struct Launch {
  std::vector<AttendOperation*> operations;  // of one geometry
  // Of the batch, but not launched, each with the reason.
  std::vector<std::pair<AttendOperation*, absl::Status>> refused;

  std::vector<kernels::PageCopy> copies;    // shared pages that are about to be written
  std::vector<kernels::RowAppend> appends;  // from staging memory
  std::vector<ResidentKv> resident;         // of each span that names a sequence, in their order
  std::vector<int32_t> pages;               // places in the arena, in Arena::kUnitBytes

  uint64_t id = 0;  // the SequenceStore's; 0: no operation names a sequence

  kernels::Geometry geometry() const { return operations.front()->request.geometry(); }
  kernels::PageLayout page_layout() const {
    const kernels::Geometry g = geometry();
    return {g.dtype, g.num_kv_heads, g.head_dim};
  }

  void Clear() {
    operations.clear();
    refused.clear();
    copies.clear();
    appends.clear();
    resident.clear();
    pages.clear();
    id = 0;
  }
};

// The launch's operations as a kernel takes them, appended to `*spans`: inline K/V where it lies in
// staging memory, resident K/V in the pages that start at `arena`. `pages` are the launch's, where
// the kernel can read them. Append-only operations have no span.
void AppendSpans(const Launch& launch, const std::byte* arena, const int32_t* pages,
                 std::vector<kernels::Span>* spans);

// Pages that change their segment.
struct PageMoves {
  struct OfOneSize {
    int64_t page_bytes = 0;
    std::vector<kernels::PageCopy> copies;
  };
  std::vector<OfOneSize> groups;
  // Each page with the one that lends it its new place.
  std::vector<std::pair<uint32_t, uint32_t>> pages;

  bool empty() const { return pages.empty(); }
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_LAUNCH_H_
