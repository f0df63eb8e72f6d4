// A sequence: the resident K/V of one token sequence.
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "kernels/kv_pages.h"
#include "server/base/clock.h"
#include "server/kv/arena.h"
#include "server/kv/launch.h"
#include "server/kv/placement.h"
#include "server/request/order.h"
#include "server/request/sequence_id.h"

namespace flashcore::server {

struct SequenceShape {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  kernels::DType dtype = kernels::DType::kFloat16;

  // Holds for a validated shape.
  kernels::PageLayout page_layout() const {
    return {dtype, static_cast<int32_t>(num_kv_heads), static_cast<int32_t>(head_dim)};
  }
  size_t page_bytes() const { return static_cast<size_t>(page_layout().page_bytes()); }
};

// What is told about a sequence.
struct SequenceInfo {
  SequenceId id;
  SequenceShape shape;
  std::vector<uint64_t> layer_lengths;  // rows, [num_layers]
  size_t kv_bytes = 0;                  // of its pages, those shared with others included
  size_t hot_bytes = 0;                 // of these, in the hot segment
  bool pin = false;
  Nanoseconds idle{0};
};

// Rows that a running launch appends to a layer. They become the layer's when the launch has
// succeeded; until then nobody but the launch sees them.
struct PendingAppend {
  size_t first_page = 0;      // page t of the layer will be pages[t - first_page] from here on
  std::vector<PageId> pages;  // new ones; the first may replace a shared, partly filled page
  uint64_t length = 0;        // of the layer, then
  bool discarded = false;     // truncated meanwhile: the rows are gone before they came
  uint64_t launch = 0;
};

// One layer. Rows [0, length) are in pages; a page may be shared with other sequences, and is then
// copied before this one writes to it.
struct SequenceLayer {
  std::vector<PageId> pages;  // [ceil(length / kPageTokens)]
  uint64_t length = 0;        // rows
  std::unique_ptr<PendingAppend> pending;
  OrderSlot order;  // the Batcher's
};

// Owned by the SequenceStore and by the leases on it, guarded by the store but for `order`.
struct Sequence {
  SequenceId id;
  SequenceShape shape;
  bool pin = false;
  uint32_t client = 0;                // who pays for it
  uint64_t serial = 0;                // counts creations: the order of a listing
  std::vector<SequenceLayer> layers;  // [num_layers], never resized

  bool deleted = false;
  int users = 0;            // leases
  int launches = 0;         // that are running and read or write it
  uint64_t lease_mark = 0;  // the last operation that leased it
  TimePoint last_used;
  ReadRate read_rate;
  size_t metadata_bytes = 0;                              // host memory that it was charged for
  std::list<std::shared_ptr<Sequence>>::iterator by_use;  // its place in the store's list
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_H_
