#include "server/kv/placement.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "server/kv/launch.h"
#include "server/kv/page_pool.h"
#include "server/kv/sequence.h"
#include "server/kv/sequence_table.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {
namespace {

// The hot or the cold bytes of an unpinned candidate.
struct Part {
  size_t candidate = 0;
  size_t bytes = 0;
  bool hot = false;
  double worth = 0;  // reads of each byte per second; times the hysteresis if it is hot

  // The order in which parts get room. A candidate's hot bytes come before its cold ones.
  bool operator<(const Part& other) const {
    return std::tie(other.worth, other.hot, candidate) < std::tie(worth, hot, other.candidate);
  }
};

// The parts that should be hot if there is room, in the order in which they get it.
std::vector<Part> OrderedParts(absl::Span<const PlacementCandidate> candidates,
                               const PlacementOptions& options) {
  std::vector<Part> parts;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const PlacementCandidate& candidate = candidates[i];
    if (candidate.pinned || candidate.bytes == 0) continue;
    assert(candidate.bytes_read_per_second >= 0);
    const double reads = candidate.bytes_read_per_second / static_cast<double>(candidate.bytes);
    const size_t hot = std::min(candidate.hot_bytes, candidate.bytes);
    const size_t cold = candidate.bytes - hot;
    if (hot > 0) parts.push_back({i, hot, true, reads * options.hysteresis});
    if (cold > 0 && reads >= options.min_reads_per_second) parts.push_back({i, cold, false, reads});
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// Calls visit(page) for every page of a sequence that can move, from the start of the sequence:
// page 0 of every layer, then page 1, because a shared prefix is read at every layer. A page that
// is not full stays where it is, because a running launch may write to it.
template <typename Visit>
void ForEachFullPage(const Sequence& sequence, const Visit& visit) {
  bool any = true;
  for (size_t index = 0; any; ++index) {
    any = false;
    for (const SequenceLayer& layer : sequence.layers) {
      if (index >= layer.length / kernels::kPageTokens) continue;
      any = true;
      visit(layer.pages[index]);
    }
  }
}

// The pages in the first bytes[i] bytes of sequences[i], for all i.
absl::flat_hash_set<PageId> FirstPages(const std::vector<const Sequence*>& sequences,
                                       const std::vector<size_t>& bytes) {
  absl::flat_hash_set<PageId> pages;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const size_t page_bytes = sequences[i]->shape.page_bytes();
    size_t left = bytes[i];
    ForEachFullPage(*sequences[i], [&](PageId page) {
      if (left < page_bytes) return;
      left -= page_bytes;
      pages.insert(page);
    });
  }
  return pages;
}

}  // namespace

std::vector<size_t> ChooseHotBytes(absl::Span<const PlacementCandidate> candidates,
                                   const PlacementOptions& options) {
  assert(options.hysteresis >= 1);
  std::vector<size_t> chosen(candidates.size());
  size_t room = options.capacity_bytes;
  const auto give = [&](size_t candidate, size_t bytes) {
    const size_t given = std::min(bytes, room);
    chosen[candidate] += given;
    room -= given;
  };
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].pinned) give(i, candidates[i].bytes);
  }
  for (const Part& part : OrderedParts(candidates, options)) give(part.candidate, part.bytes);
  return chosen;
}

// How many bytes of each sequence should be hot.
std::vector<size_t> PageMover::ChooseHot(const Sequences& sequences) const {
  const TimePoint now = clock_.Now();
  std::vector<PlacementCandidate> candidates;
  for (const Sequence* sequence : sequences) {
    PlacementCandidate& candidate = candidates.emplace_back();
    const size_t page_bytes = sequence->shape.page_bytes();
    ForEachFullPage(*sequence, [&](PageId page) {
      candidate.bytes += page_bytes;
      if (pages_.arena().segment(page) == Segment::kHot) candidate.hot_bytes += page_bytes;
    });
    candidate.pinned = sequence->settings.pin;
    candidate.bytes_read_per_second = sequence->read_rate.BytesPerSecond(now);
  }
  PlacementOptions options;
  options.capacity_bytes = pages_.arena().capacity_bytes(Segment::kHot);
  return ChooseHotBytes(candidates, options);
}

PageMoves PageMover::Begin(size_t max_bytes) {
  PageMoves moves;
  const Arena& arena = pages_.arena();
  if (moving_ || arena.capacity_bytes(Segment::kHot) == 0) return moves;
  Sequences sequences;
  for (const auto& [id, sequence] : table_.by_id()) sequences.push_back(sequence.get());
  std::sort(sequences.begin(), sequences.end(),
            [](const Sequence* a, const Sequence* b) { return a->serial < b->serial; });
  // A shared page should be hot if any of its sequences wants it hot.
  const absl::flat_hash_set<PageId> wanted = FirstPages(sequences, ChooseHot(sequences));
  absl::flat_hash_set<PageId> considered;
  size_t left = max_bytes;
  for (const Segment to : {Segment::kCold, Segment::kHot}) {  // make room first
    for (const Sequence* sequence : sequences) {
      const size_t page_bytes = sequence->shape.page_bytes();
      ForEachFullPage(*sequence, [&](PageId page) {
        const Segment wants = wanted.contains(page) ? Segment::kHot : Segment::kCold;
        if (wants != to || arena.segment(page) == to || left < page_bytes) return;
        if (considered.insert(page).second && Reserve(page, to, &moves)) left -= page_bytes;
      });
    }
  }
  moving_ = !moves.empty();
  return moves;
}

// Adds the move of `page`. False if `to` has no room.
bool PageMover::Reserve(PageId page, Segment to, PageMoves* moves) {
  const Arena& arena = pages_.arena();
  const size_t bytes = arena.page_bytes(page);
  const PageId destination = pages_.AllocateUnpaid(bytes, to);
  if (destination == kNoPage) return false;
  pages_.AddRef(page, nullptr);  // a sequence that wants to write to the page now copies it
  auto group = std::find_if(moves->groups.begin(), moves->groups.end(), [&](const auto& g) {
    return g.page_bytes == static_cast<int64_t>(bytes);
  });
  if (group == moves->groups.end()) {
    group = moves->groups.insert(group, {static_cast<int64_t>(bytes), {}});
  }
  group->copies.push_back({arena.address(page), arena.address(destination)});
  moves->pages.push_back({page, destination});
  (to == Segment::kHot ? metrics_.kv_promoted_bytes : metrics_.kv_demoted_bytes).Increment(bytes);
  return true;
}

void PageMover::End(const PageMoves& moves, bool ok) {
  for (const PageMoves::Move& move : moves.pages) {
    if (ok) pages_.SwapPlaces(move.page, move.destination);
    pages_.Unref(move.page, nullptr);
    // After the swap it has the old place, which running launches may be reading.
    pages_.UnrefAfterLaunches(move.destination, nullptr);
  }
  moving_ = false;
}

}  // namespace flashcore::server
