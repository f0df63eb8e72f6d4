#include "server/kv/arena.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>

namespace flashcore::server {

void Arena::SuperblockList::PushFront(Superblock* superblock) {
  superblock->previous = nullptr;
  superblock->next = first;
  if (first != nullptr) first->previous = superblock;
  first = superblock;
}

void Arena::SuperblockList::Remove(Superblock* superblock) {
  (superblock->previous != nullptr ? superblock->previous->next : first) = superblock->next;
  if (superblock->next != nullptr) superblock->next->previous = superblock->previous;
}

Arena::Arena(const Options& options)
    : base_(options.base),
      superblock_bytes_(options.superblock_bytes),
      superblock_units_(static_cast<uint32_t>(options.superblock_bytes / kUnitBytes)),
      superblocks_(options.bytes / options.superblock_bytes) {
  assert(reinterpret_cast<uintptr_t>(base_) % 64 == 0);
  assert(superblock_bytes_ % kUnitBytes == 0);
  assert(options.bytes / kUnitBytes <= size_t{std::numeric_limits<int32_t>::max()});
  const size_t hot = std::min(options.hot_bytes, options.bytes) / superblock_bytes_;
  state(Segment::kHot).superblocks = hot;
  state(Segment::kCold).superblocks = superblocks_.size() - hot;
  for (size_t i = superblocks_.size(); i-- > 0;) {  // backwards, so that the first are used first
    SegmentState& segment = state(i < hot ? Segment::kHot : Segment::kCold);
    segment.free.PushFront(&superblocks_[i]);
    ++segment.free_superblocks;
  }
}

PageId Arena::Allocate(size_t page_bytes, Segment segment, uint32_t owner) {
  assert(ValidSize(page_bytes));
  Superblock* const superblock = FindSuperblock(page_bytes, segment);
  if (superblock == nullptr) return kNoPage;
  const PageId page = TakeSlot(superblock);
  pages_[page].refs = 1;
  pages_[page].owner = owner;
  ++num_pages_;
  state(segment).used_bytes += page_bytes;

  Room& room = superblock->size_class->room[Index(segment)];
  --room.slots;
  if (++superblock->pages == superblock->size_class->slots) room.superblocks.Remove(superblock);
  return page;
}

void Arena::AddRef(PageId page) {
  assert(Alive(page) && refs(page) < std::numeric_limits<uint32_t>::max());
  ++pages_[page].refs;
}

bool Arena::Unref(PageId page) {
  assert(Alive(page));
  if (--pages_[page].refs > 0) return false;
  Superblock* const superblock = &superblocks_[SuperblockOf(page)];
  SizeClass& size_class = *superblock->size_class;
  const Segment segment = this->segment(page);
  ReturnSlot(superblock, page);
  --num_pages_;
  state(segment).used_bytes -= size_class.page_bytes;

  Room& room = size_class.room[Index(segment)];
  ++room.slots;
  if (superblock->pages-- == size_class.slots) room.superblocks.PushFront(superblock);
  if (superblock->pages == 0) ReleaseSuperblock(superblock, segment);
  return true;
}

size_t Arena::page_bytes(PageId page) const {
  assert(Alive(page));
  return superblocks_[SuperblockOf(page)].size_class->page_bytes;
}

Segment Arena::segment(PageId page) const {
  return SuperblockOf(page) < state(Segment::kHot).superblocks ? Segment::kHot : Segment::kCold;
}

void Arena::SwapPlaces(PageId a, PageId b) {
  assert(page_bytes(a) == page_bytes(b));
  // All else is counted by place, and both places stay taken.
  std::swap(pages_[a].place, pages_[b].place);
}

size_t Arena::capacity_bytes(Segment segment) const {
  return state(segment).superblocks * superblock_bytes_;
}

size_t Arena::used_bytes(Segment segment) const { return state(segment).used_bytes; }

size_t Arena::free_bytes(Segment segment, size_t page_bytes) const {
  assert(ValidSize(page_bytes));
  size_t slots = state(segment).free_superblocks * (superblock_bytes_ / page_bytes);
  const auto found = size_classes_.find(page_bytes);
  if (found != size_classes_.end()) slots += found->second.room[Index(segment)].slots;
  return slots * page_bytes;
}

bool Arena::ValidSize(size_t page_bytes) const {
  return page_bytes > 0 && page_bytes % kUnitBytes == 0 && page_bytes <= max_page_bytes();
}

Arena::Superblock* Arena::FindSuperblock(size_t page_bytes, Segment segment) {
  const auto found = size_classes_.find(page_bytes);
  if (found != size_classes_.end()) {
    Superblock* const first = found->second.room[Index(segment)].superblocks.first;
    if (first != nullptr) return first;
  }
  return TakeSuperblock(page_bytes, segment);
}

Arena::Superblock* Arena::TakeSuperblock(size_t page_bytes, Segment segment) {
  SegmentState& from = state(segment);
  Superblock* const superblock = from.free.first;
  if (superblock == nullptr) return nullptr;
  from.free.Remove(superblock);
  --from.free_superblocks;

  SizeClass& size_class =
      size_classes_.try_emplace(page_bytes, page_bytes, superblock_bytes_).first->second;
  ++size_class.superblocks;
  Room& room = size_class.room[Index(segment)];
  room.superblocks.PushFront(superblock);
  room.slots += size_class.slots;
  superblock->size_class = &size_class;
  return superblock;
}

void Arena::ReleaseSuperblock(Superblock* superblock, Segment segment) {
  SizeClass& size_class = *superblock->size_class;
  Room& room = size_class.room[Index(segment)];
  room.superblocks.Remove(superblock);
  room.slots -= size_class.slots;
  if (--size_class.superblocks == 0) size_classes_.erase(size_class.page_bytes);

  pages_[superblock->last_free].next_free = first_spare_;
  first_spare_ = superblock->first_free;

  SegmentState& to = state(segment);
  *superblock = Superblock();
  to.free.PushFront(superblock);
  ++to.free_superblocks;
}

PageId Arena::TakeSlot(Superblock* superblock) {
  PageId page = superblock->first_free;
  if (page != kNoPage) {
    superblock->first_free = pages_[page].next_free;
    if (superblock->first_free == kNoPage) superblock->last_free = kNoPage;
    return page;
  }
  page = TakeSpare();
  const size_t index = superblock - superblocks_.data();
  const size_t offset = superblock->carved++ * (superblock->size_class->page_bytes / kUnitBytes);
  pages_[page].place = static_cast<int32_t>(index * superblock_units_ + offset);
  return page;
}

void Arena::ReturnSlot(Superblock* superblock, PageId page) {
  pages_[page].next_free = superblock->first_free;
  if (superblock->first_free == kNoPage) superblock->last_free = page;
  superblock->first_free = page;
}

PageId Arena::TakeSpare() {
  const PageId page = first_spare_;
  if (page == kNoPage) {
    pages_.emplace_back();
    return static_cast<PageId>(pages_.size() - 1);
  }
  first_spare_ = pages_[page].next_free;
  return page;
}

}  // namespace flashcore::server
