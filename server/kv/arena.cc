#include "server/kv/arena.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <limits>
#include <utility>

namespace flashcore::server {

Arena::Arena(const KvMemory& memory, size_t superblock_bytes)
    : base_(memory.base),
      give_back_(memory.give_back),
      superblock_bytes_(superblock_bytes),
      superblock_units_(static_cast<uint32_t>(superblock_bytes / kUnitBytes)) {
  assert(reinterpret_cast<uintptr_t>(base_) % 64 == 0);
  assert(superblock_bytes_ % kUnitBytes == 0);
  assert(memory.bytes / kUnitBytes <= size_t{std::numeric_limits<int32_t>::max()});
  const size_t superblocks = memory.bytes / superblock_bytes_;
  const size_t hot = std::min(memory.hot_bytes, memory.bytes) / superblock_bytes_;
  first_cold_place_ = static_cast<int32_t>(hot * superblock_units_);
  for (size_t i = 0; i < superblocks; ++i) {
    SegmentState& segment = state(i < hot ? Segment::kHot : Segment::kCold);
    ++segment.superblocks;
    segment.empty.emplace_back().place = static_cast<int32_t>(i * superblock_units_);
    superblocks_.push_back(std::prev(segment.empty.end()));
  }
}

PageId Arena::Allocate(size_t page_bytes, Segment segment, void* owner) {
  assert(page_bytes > 0 && page_bytes % kUnitBytes == 0 && page_bytes <= max_page_bytes());
  SegmentState& from = state(segment);
  Superblocks& partial = from.partial[page_bytes];
  if (partial.empty()) {
    Superblocks& unused = from.emptied.empty() ? from.empty : from.emptied;
    if (unused.empty()) return kNoPage;
    partial.splice(partial.begin(), unused, unused.begin());
    Divide(&partial.front(), page_bytes);
  }
  if (free_ids_.empty()) {
    free_ids_.push_back(static_cast<PageId>(pages_.size()));
    pages_.emplace_back();
  }
  const PageId page = free_ids_.back();
  free_ids_.pop_back();
  std::vector<int32_t>& places = partial.front().free_places;
  pages_[page] = {places.back(), 1, owner};
  places.pop_back();
  from.used_bytes += page_bytes;
  if (places.empty()) from.full.splice(from.full.begin(), partial, partial.begin());
  return page;
}

void Arena::Divide(Superblock* superblock, size_t page_bytes) const {
  superblock->page_bytes = page_bytes;
  superblock->free_places.clear();
  for (size_t slot = superblock_bytes_ / page_bytes; slot-- > 0;) {  // the first one is used first
    superblock->free_places.push_back(superblock->place +
                                      static_cast<int32_t>(slot * (page_bytes / kUnitBytes)));
  }
}

void Arena::AddRef(PageId page) {
  assert(Alive(page) && refs(page) < std::numeric_limits<uint32_t>::max());
  ++pages_[page].refs;
}

bool Arena::Unref(PageId page) {
  assert(Alive(page));
  if (--pages_[page].refs > 0) return false;
  const Superblocks::iterator superblock = superblocks_[SuperblockOf(page)];
  const size_t page_bytes = superblock->page_bytes;
  SegmentState& to = state(segment(page));
  Superblocks& partial = to.partial[page_bytes];
  std::vector<int32_t>& places = superblock->free_places;
  if (places.empty()) partial.splice(partial.begin(), to.full, superblock);
  places.push_back(place(page));
  if (places.size() == superblock_bytes_ / page_bytes) {
    superblock->emptied = now_;
    to.emptied.splice(to.emptied.begin(), partial, superblock);
  }
  free_ids_.push_back(page);
  to.used_bytes -= page_bytes;
  return true;
}

bool Arena::GiveBackUnneeded(TimePoint now) {
  now_ = now;
  if (!give_back_) return false;
  for (SegmentState& segment : segments_) {
    if (segment.emptied.empty()) continue;
    const auto oldest = std::prev(segment.emptied.end());
    if (now - oldest->emptied < kKeepEmpty) continue;
    give_back_(base_ + kUnitBytes * oldest->place, superblock_bytes_);
    segment.empty.splice(segment.empty.begin(), segment.emptied, oldest);
    return true;
  }
  return false;
}

size_t Arena::page_bytes(PageId page) const {
  assert(Alive(page));
  return superblocks_[SuperblockOf(page)]->page_bytes;
}

size_t Arena::free_bytes(size_t page_bytes) const {
  size_t pages = 0;
  for (const SegmentState& segment : segments_) {
    pages += SuperblocksWithoutPages(segment) * (superblock_bytes_ / page_bytes);
    const auto partial = segment.partial.find(page_bytes);
    if (partial == segment.partial.end()) continue;
    for (const Superblock& superblock : partial->second) pages += superblock.free_places.size();
  }
  return pages * page_bytes;
}

void Arena::SwapPlaces(PageId a, PageId b) {
  assert(page_bytes(a) == page_bytes(b));
  // Both slots stay in use, so the superblocks do not change.
  std::swap(pages_[a].place, pages_[b].place);
}

}  // namespace flashcore::server
