// The K/V memory of one device, divided into pages. The arena hands out places; it never reads or
// writes the memory itself.
//
//   base                                                                    base + bytes
//   |<------ hot segment ------>|<--------------- cold segment ---------------->|
//   [ superblock ][ superblock ][ superblock ][ superblock ]    ...             |unused tail
//   [pg|pg|pg|pg ]
//
// The hot segment is as large as what the device can keep persisting in its L2 cache. Models differ
// in page size, so both segments are divided into superblocks of one fixed size. A superblock
// serves pages of one size at a time; once it is empty it can serve any size again. An arena
// without pages is therefore never fragmented, whatever came before.
//
// A superblock that has been empty for kKeepEmpty is given back to the system, where the device
// can.
//
// A page has an id, which never changes while the page is alive. Its place can change: SwapPlaces
// moves pages between the segments. Pages are reference-counted, so that sequences can share them.
#ifndef FLASHCORE_SERVER_KV_ARENA_H_
#define FLASHCORE_SERVER_KV_ARENA_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <vector>

#include "server/base/clock.h"

namespace flashcore::server {

// K/V memory of a device. Not owned.
struct KvMemory {
  std::byte* base = nullptr;
  size_t bytes = 0;
  size_t hot_bytes = 0;  // the first `hot_bytes` of `bytes` fit the persisting part of the L2
  // Gives memory that no page needs back to the system, until it is next written; it reads as zeros
  // then. Whole superblocks. Takes microseconds. Null: the device keeps its memory.
  std::function<void(std::byte* data, size_t bytes)> give_back = nullptr;
};

using PageId = uint32_t;
inline constexpr PageId kNoPage = ~PageId{0};

enum class Segment : uint8_t { kHot, kCold };

// Not thread-safe: the SequenceStore's mutex guards it. Does not own the memory. Every operation
// takes constant time, amortised over the growth of its records. Violated preconditions are
// asserted, not reported; every PageId argument must be of a page that is alive.
class Arena {
 public:
  // The unit of places and the divisor of every page size: of 8-bit pages, whose rows have
  // scales, nothing larger is. An int32 place reaches 512 GiB.
  static constexpr size_t kUnitBytes = 256;
  static constexpr size_t kMaxBytes = kUnitBytes << 31;
  static constexpr size_t kDefaultSuperblockBytes = size_t{4} << 20;
  // So long memory stays for who comes next: writing it anew costs a fault for each of its pages.
  static constexpr std::chrono::seconds kKeepEmpty{5};

  // `memory.base` is aligned to 64 bytes and may be memory that only the device can read.
  // `superblock_bytes` is a multiple of kUnitBytes. Hot memory is rounded down to whole
  // superblocks; a tail smaller than a superblock stays unused.
  Arena(const KvMemory& memory, size_t superblock_bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A page in `segment` with one reference; kNoPage if the segment has no room for it. `page_bytes`
  // is a multiple of kUnitBytes, at most max_page_bytes(). `owner` is any pointer of the caller's.
  PageId Allocate(size_t page_bytes, Segment segment, void* owner);

  void AddRef(PageId page);
  // True if that was the last reference: the page is free, and its id may be reused.
  bool Unref(PageId page);

  uint32_t refs(PageId page) const { return pages_[page].refs; }
  void* owner(PageId page) const { return pages_[page].owner; }
  void SetOwner(PageId page, void* owner) { pages_[page].owner = owner; }
  size_t page_bytes(PageId page) const;
  Segment segment(PageId page) const {
    return place(page) < first_cold_place() ? Segment::kHot : Segment::kCold;
  }
  int32_t place(PageId page) const { return pages_[page].place; }  // in kUnitBytes from base()
  std::byte* address(PageId page) const { return base_ + kUnitBytes * place(page); }

  // Lower places are in the hot segment.
  int32_t first_cold_place() const { return first_cold_place_; }

  // Gives one superblock back that nobody has needed for kKeepEmpty; false if there is none. Times
  // are those of the calls, which come twice a second.
  bool GiveBackUnneeded(TimePoint now);

  // Exchanges the places of two pages of one size. The caller moves their contents.
  void SwapPlaces(PageId a, PageId b);

  std::byte* base() const { return base_; }
  size_t max_page_bytes() const { return superblock_bytes_; }
  size_t capacity_bytes(Segment segment) const {
    return state(segment).superblocks * superblock_bytes_;
  }
  // In pages.
  size_t used_bytes(Segment segment) const { return state(segment).used_bytes; }
  // The room for more pages of `page_bytes`: free memory, without what is kept for other sizes.
  size_t free_bytes(size_t page_bytes) const;
  size_t num_pages() const { return pages_.size() - free_ids_.size(); }  // alive

 private:
  struct Page {
    int32_t place = 0;
    uint32_t refs = 0;  // 0: the id is free
    void* owner = nullptr;
  };

  // Divided into slots of the page size that it serves.
  struct Superblock {
    int32_t place = 0;
    size_t page_bytes = 0;
    std::vector<int32_t> free_places;  // of slots without a page
    TimePoint emptied;                 // while it is in SegmentState::emptied
  };
  using Superblocks = std::list<Superblock>;

  // Each superblock is in exactly one of the lists of its segment.
  struct SegmentState {
    size_t superblocks = 0;
    size_t used_bytes = 0;
    Superblocks emptied;  // they have had pages: the last one is the first to be used again
    Superblocks empty;    // the system has their memory
    // Partly used superblocks, by page_bytes, filled from the front. One that was full returns to
    // the front, so that those with few pages can become empty.
    std::unordered_map<size_t, Superblocks> partial;
    Superblocks full;
  };

  SegmentState& state(Segment segment) { return segments_[segment == Segment::kCold]; }
  const SegmentState& state(Segment segment) const { return segments_[segment == Segment::kCold]; }
  bool Alive(PageId page) const { return page < pages_.size() && refs(page) > 0; }
  size_t SuperblockOf(PageId page) const { return place(page) / superblock_units_; }
  size_t SuperblocksWithoutPages(const SegmentState& segment) const {
    return segment.emptied.size() + segment.empty.size();
  }
  // Makes an empty superblock serve `page_bytes`.
  void Divide(Superblock* superblock, size_t page_bytes) const;

  std::byte* const base_;
  const std::function<void(std::byte*, size_t)> give_back_;
  const size_t superblock_bytes_;
  const uint32_t superblock_units_;
  int32_t first_cold_place_ = 0;
  std::array<SegmentState, 2> segments_;
  std::vector<Superblocks::iterator> superblocks_;  // by place, hot ones first
  std::vector<Page> pages_;                         // by PageId
  std::vector<PageId> free_ids_;
  TimePoint now_;  // of the last call of GiveBackUnneeded
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_ARENA_H_
