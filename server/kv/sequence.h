// A sequence: the resident K/V of one token sequence. Each layer has a page table and a length, and
// a page holds the K and V of 64 tokens (kernels::kPageTokens):
//
//   layer 0   pages [17][ 4][ 9]   length 150: two full pages, and 22 rows of page 9
//   layer 1   pages [ 5][21]       length 128
//
// A fork copies the page tables and shares the pages. Appends never change a full page. A shared
// page that is partly filled is copied before a sequence appends to it.
#ifndef FLASHCORE_SERVER_KV_SEQUENCE_H_
#define FLASHCORE_SERVER_KV_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kv_pages.h"
#include "server/base/clock.h"
#include "server/kv/arena.h"
#include "server/kv/launch.h"
#include "server/kv/read_rate.h"
#include "server/request/order.h"
#include "server/request/sequence_id.h"

namespace flashcore::server {

struct KvClient;  // page_pool.h

struct SequenceShape {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  kernels::DType dtype = kernels::DType::kFloat16;  // of the rows that come
  kernels::KvDType kv_dtype = kernels::KvDType::kSameAsQuery;

  // For a validated shape.
  kernels::PageLayout page_layout() const {
    return {dtype, static_cast<int32_t>(num_kv_heads), static_cast<int32_t>(head_dim), kv_dtype};
  }
  size_t page_bytes() const { return static_cast<size_t>(page_layout().page_bytes()); }
};

// The choices of a sequence's creator besides its shape.
struct SequenceSettings {
  bool pin = false;
  // The other clients that may read and fork it, if they know its id: everybody, or the members of
  // a group that the creator belongs to. Not both.
  bool shared = false;
  std::string group = {};
  // Unset: SequenceOptions::idle_timeout.
  std::optional<Nanoseconds> idle_timeout = {};
  // A lease of the creator, whose end deletes the sequence.
  std::optional<LeaseId> lease = {};
};

// A sequence's state as clients see it.
struct SequenceInfo {
  SequenceId id;
  SequenceShape shape;
  SequenceSettings settings;            // with idle_timeout, unless it never expires
  std::vector<uint64_t> layer_lengths;  // rows, [num_layers]
  size_t kv_bytes = 0;                  // of its pages, including those shared with others
  size_t hot_bytes = 0;                 // the part of kv_bytes in the hot segment
  Nanoseconds idle{0};
};

// `rows` of one layer, which fit the kernels' int32.
inline size_t PagesFor(uint64_t rows) {
  return static_cast<size_t>(kernels::PagesFor(static_cast<int32_t>(rows)));
}

// Rows that a running launch appends to a layer. Only that launch sees them. They become part of
// the layer when the launch succeeds.
struct PendingAppend {
  size_t first_page = 0;      // pages[i] is page first_page + i of the layer
  std::vector<PageId> pages;  // new; the first one may replace a shared, partly filled page
  uint64_t length = 0;        // of the layer after the append
  bool discarded = false;     // the layer was truncated meanwhile: drop the rows
  uint64_t launch = 0;
};

// Rows [0, length) are in `pages`.
struct SequenceLayer {
  std::vector<PageId> pages;  // [ceil(length / kPageTokens)]
  uint64_t length = 0;        // rows
  // The places in the arena of the first of `pages`, as launches list them: kept from launch to
  // launch, and brought up to date by the LaunchBuilder. Valid while no page has moved since, that
  // is while PagePool::moves() is `places_of`.
  std::vector<int32_t> places;
  uint64_t places_of = 0;
  std::unique_ptr<PendingAppend> pending;
  OrderSlot order;  // guarded by the Batcher

  // As the launch that appends sees the layer, with its pending rows.
  uint64_t pending_length() const {
    if (pending == nullptr) return length;
    return pending->length;  // NOLINT(clang-analyzer-core.NullDereference): it was checked
  }
  // Keeps the first `keep` pages; the caller has dropped the references to the others.
  void CutPages(size_t keep) {
    if (keep < pages.size()) pages.resize(keep);
    if (keep < places.size()) places.resize(keep);
  }
  PageId PageAt(size_t index) const {
    if (pending == nullptr || index < pending->first_page) return pages[index];
    return pending->pages[index - pending->first_page];
  }
};

// Owned by the SequenceTable and by the leases on it. The SequenceStore's mutex guards it, except
// for `order`.
struct Sequence {
  SequenceId id;
  SequenceShape shape;
  SequenceSettings settings;
  KvClient* client = nullptr;         // of the client that owns it and pays; null once deleted
  uint64_t serial = 0;                // ascends with the creation: listings are in this order
  std::vector<SequenceLayer> layers;  // [num_layers], never resized

  bool deleted = false;
  int leases = 0;
  int launches = 0;         // running ones that read or append to it
  uint64_t lease_mark = 0;  // number of the last operation that leased it
  TimePoint last_used;
  ReadRate read_rate;
  size_t metadata_bytes = 0;  // host memory charged for it

  // Its places in the SequenceTable.
  std::list<std::shared_ptr<Sequence>>::iterator by_use;  // of the client
  std::multimap<TimePoint, std::shared_ptr<Sequence>>::iterator
      expiry;                                               // if it has an idle_timeout
  std::list<std::shared_ptr<Sequence>>::iterator by_lease;  // if it has a lease
};
using SequencePtr = std::shared_ptr<Sequence>;

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_SEQUENCE_H_
