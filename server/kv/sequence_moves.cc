// SequenceStore: which pages should change their segment, and what happens when they have.
#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "server/kv/sequence_store.h"

namespace flashcore::server {
namespace {

// Calls visit(page) for the pages of a sequence that can move, from its start: page 0 of every
// layer, then page 1, because a prefix that others share is read at every layer. A page that is not
// full may be written by a launch that runs, so it stays where it is.
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

// The pages within the first `bytes` of each sequence: a page is wanted if any of the sequences
// that share it wants it.
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

// How many bytes of each of the sequences should be hot.
std::vector<size_t> SequenceStore::ChooseHot(const std::vector<const Sequence*>& sequences) const {
  const TimePoint now = clock_->Now();
  std::vector<PlacementCandidate> candidates;
  for (const Sequence* sequence : sequences) {
    PlacementCandidate& candidate = candidates.emplace_back();
    const size_t page_bytes = sequence->shape.page_bytes();
    ForEachFullPage(*sequence, [&](PageId page) ABSL_NO_THREAD_SAFETY_ANALYSIS {
      candidate.bytes += page_bytes;
      if (arena_.segment(page) == Segment::kHot) candidate.hot_bytes += page_bytes;
    });
    candidate.pinned = sequence->pin;
    candidate.bytes_read_per_second = sequence->read_rate.BytesPerSecond(now);
  }
  PlacementOptions options;
  options.capacity_bytes = arena_.capacity_bytes(Segment::kHot);
  return ChooseHotBytes(candidates, options);
}

PageMoves SequenceStore::BeginMoves(size_t max_bytes) {
  PageMoves moves;
  MutexLock lock(&mutex_);
  if (moving_ || arena_.capacity_bytes(Segment::kHot) == 0) return moves;
  std::vector<const Sequence*> sequences;
  for (const SequencePtr& sequence : by_use_) sequences.push_back(sequence.get());
  std::sort(sequences.begin(), sequences.end(),
            [](const Sequence* a, const Sequence* b) { return a->serial < b->serial; });
  const absl::flat_hash_set<PageId> wanted = FirstPages(sequences, ChooseHot(sequences));
  absl::flat_hash_set<PageId> moving;
  size_t left = max_bytes;
  for (const Segment to : {Segment::kCold, Segment::kHot}) {  // make room first
    for (const Sequence* sequence : sequences) {
      ForEachFullPage(*sequence, [&](PageId page) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        const bool wants_hot = wanted.contains(page);
        if (wants_hot != (to == Segment::kHot) || arena_.segment(page) == to) return;
        if (left >= arena_.page_bytes(page) && moving.insert(page).second) {
          left -= BeginMove(page, to, &moves);
        }
      });
    }
  }
  moving_ = !moves.empty();
  return moves;
}

size_t SequenceStore::BeginMove(PageId page, Segment to, PageMoves* moves) {
  const size_t bytes = arena_.page_bytes(page);
  const PageId lender = arena_.Allocate(bytes, to, kNoOwner);
  if (lender == kNoPage) return 0;
  arena_.AddRef(page);  // so that nobody writes to it meanwhile: who wants to, copies it
  auto group = std::find_if(moves->groups.begin(), moves->groups.end(), [&](const auto& g) {
    return g.page_bytes == static_cast<int64_t>(bytes);
  });
  if (group == moves->groups.end()) {
    group = moves->groups.insert(group, {static_cast<int64_t>(bytes), {}});
  }
  group->copies.push_back({arena_.address(page), arena_.address(lender)});
  moves->pages.emplace_back(page, lender);
  (to == Segment::kHot ? metrics_->kv_promoted_bytes : metrics_->kv_demoted_bytes).Increment(bytes);
  return bytes;
}

void SequenceStore::EndMoves(const PageMoves& moves, bool ok) {
  MutexLock lock(&mutex_);
  for (const auto& [page, lender] : moves.pages) {
    if (ok) arena_.SwapPlaces(page, lender);
    Unref(page);
    UnrefLater(lender);  // which now has the old place, where launches may be reading
  }
  moving_ = false;
  UnrefWhatIsDue();
}

bool SequenceStore::TakeHotLeft() {
  MutexLock lock(&mutex_);
  const size_t capacity = arena_.capacity_bytes(Segment::kHot);
  const size_t free = capacity - arena_.used_bytes(Segment::kHot);
  const size_t left = std::min(hot_left_bytes_, free);
  if (left == 0 || left < capacity / 4) return false;
  hot_left_bytes_ = 0;
  return true;
}

}  // namespace flashcore::server
