// Which K/V lies in the hot segment: the policy, on numbers only, and the mover that carries it
// out.
#ifndef FLASHCORE_SERVER_KV_PLACEMENT_H_
#define FLASHCORE_SERVER_KV_PLACEMENT_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/kv/arena.h"

namespace flashcore::server {

class DeviceMetrics;
class PagePool;
class SequenceTable;
struct PageMoves;  // launch.h
struct Sequence;

// One sequence as the policy sees it.
struct PlacementCandidate {
  size_t bytes = 0;      // K/V that can move: all full pages
  size_t hot_bytes = 0;  // the part of it that is in the hot segment now
  bool pinned = false;
  double bytes_read_per_second = 0;  // of its K/V; not negative
};

struct PlacementOptions {
  size_t capacity_bytes = 0;  // of the hot segment
  // An unpinned sequence displaces another one only if each of its bytes is read more than this
  // many times as often. Without that, two similar sequences would displace each other forever. At
  // least 1.
  double hysteresis = 2;
  // A sequence whose bytes are read less often than this is not promoted.
  double min_reads_per_second = 0.1;
};

// How many bytes of each candidate should be hot, [candidates]: each at most its `bytes`, together
// at most the capacity. A sequence may be hot in part: its first bytes, where shared prefixes are.
//
// Room goes to pinned candidates first, in their order. Then it goes to those whose bytes are read
// most often. Hot K/V stays hot, even if nobody reads it, until another candidate wants its room;
// the K/V that is read least often is displaced first. Ties go to the candidate that is hot, then
// to the first one. Takes O(n log n).
//
// The answer is stable: called again with the answer as hot_bytes, it returns the same answer.
std::vector<size_t> ChooseHotBytes(absl::Span<const PlacementCandidate> candidates,
                                   const PlacementOptions& options);

// Begin reserves a page at each destination, a device copies the bytes, and End swaps the places of
// the two pages. The id of a moved page stays, so page tables do not change. Not thread-safe: the
// SequenceStore's mutex guards it.
class PageMover {
 public:
  // All arguments outlive the mover.
  PageMover(PagePool* pages, const SequenceTable* table, const Clock* clock, DeviceMetrics* metrics)
      : pages_(*pages), table_(*table), clock_(*clock), metrics_(*metrics) {}

  // As SequenceStore::BeginMoves and EndMoves.
  PageMoves Begin(size_t max_bytes);
  void End(const PageMoves& moves, bool ok);

 private:
  using Sequences = std::vector<const Sequence*>;

  std::vector<size_t> ChooseHot(const Sequences& sequences) const;
  bool Reserve(PageId page, Segment to, PageMoves* moves);

  PagePool& pages_;
  const SequenceTable& table_;
  const Clock& clock_;
  DeviceMetrics& metrics_;
  // Between Begin and End. A page must not move twice at a time: the second copy would read a place
  // that the first has given up.
  bool moving_ = false;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_PLACEMENT_H_
