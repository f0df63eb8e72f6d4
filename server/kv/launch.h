// The seam between resident K/V and the devices: what one launch does, in terms that every device
// understands.
//
//   Batcher                      chooses the operations of a batch
//   SequenceStore::BeginLaunch   makes a Launch of them
//   Device                       executes it: copies, then appends, then attention
//   SequenceStore::EndLaunch     makes the appended rows visible, or discards them
//
// A device executes a long launch in parts, one after the other. Between them it executes others.
#ifndef FLASHCORE_SERVER_KV_LAUNCH_H_
#define FLASHCORE_SERVER_KV_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/attention.h"
#include "kernels/kv_pages.h"
#include "kernels/plan_cut.h"
#include "server/kv/arena.h"
#include "server/kv/operation.h"
#include "server/request/request.h"

namespace flashcore::server {

// The K/V of a span that names a sequence: row r is in page
// launch.pages[first_page + r / kernels::kPageTokens].
struct ResidentKv {
  size_t first_page = 0;
  int32_t rows = 0;
};

// Owns its lists, but not the operations or the memory that they point to. Not thread-safe. A lane
// reuses it from launch to launch, so that the lists keep their memory.
struct Launch {
  std::vector<AttendOperation*> operations;  // of one geometry
  // Operations of the batch that cannot be launched, each with its error.
  std::vector<std::pair<AttendOperation*, absl::Status>> refused;

  std::vector<kernels::PageCopy> copies;    // of shared pages, before an append writes to them
  std::vector<kernels::RowAppend> appends;  // from staging memory
  std::vector<ResidentKv> resident;         // one for each span that names a sequence, in order
  std::vector<int32_t> pages;               // places in the arena, in Arena::kUnitBytes

  // Bytes of resident K/V that the operations read, for the metrics.
  struct ReadBytes {
    size_t hot = 0;  // in pages of the hot segment
    size_t cold = 0;
  };
  ReadBytes read;

  // The part of the attention to compute. Only the first part of a launch has copies and appends. A
  // launch that is executed in parts has one operation.
  kernels::BatchPart part;
  bool in_parts = false;
  bool is_last_part = false;  // of a launch in parts

  bool staged = false;  // Device::Stage was called: Dispatch comes next

  uint64_t id = 0;  // given by the SequenceStore; 0: no operation names a sequence

  kernels::Geometry geometry() const { return operations.front()->request.geometry(); }
  kernels::PageLayout page_layout() const { return kernels::PageLayoutOf(geometry()); }

  void Clear() {
    operations.clear();
    refused.clear();
    copies.clear();
    appends.clear();
    resident.clear();
    pages.clear();
    part = {};
    in_parts = false;
    is_last_part = false;
    staged = false;
    read = {};
    id = 0;
  }
};

// Whether an operation, with its lengths after its appends, may join a launch that has others.
using LaunchFit = absl::FunctionRef<bool(AttendOperation*)>;

// Appends the launch's spans to `*spans`, as a kernel takes them. Inline K/V is read from staging
// memory. Resident K/V is read from the pages at `arena`; `pages` is a copy of launch.pages that
// the kernel can read. Append-only operations have no span. Spans outside launch.part have no
// slices.
void AppendSpans(const Launch& launch, const std::byte* arena, const int32_t* pages,
                 std::vector<kernels::Span>* spans);

// Pages that move to the other segment.
struct PageMoves {
  struct Group {
    int64_t page_bytes = 0;
    std::vector<kernels::PageCopy> copies;
  };
  // After the copy the two pages swap their places.
  struct Move {
    PageId page;
    PageId destination;  // reserved in the other segment
  };
  std::vector<Group> groups;  // by page size; what a device copies
  std::vector<Move> pages;

  bool empty() const { return pages.empty(); }
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_LAUNCH_H_
