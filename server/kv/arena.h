// The K/V memory of one device, cut into pages. It hands out places; it never touches what is
// there.
//
// The memory is one contiguous allocation. Its first bytes are the hot segment, as many as the
// device can keep persisting in its L2 cache; the rest is cold. Models differ in the size of a
// page, so both segments are cut into superblocks of one fixed size: a superblock serves pages of
// one size at a time, and serves any size again once it is empty. So whatever came before, an arena
// without pages is whole again.
//
// A page is known by its id, which never changes while the page lives. Its place can: SwapPlaces is
// how a page moves between the segments. Pages are reference-counted, so that sequences can share
// them.
#ifndef FLASHCORE_SERVER_KV_ARENA_H_
#define FLASHCORE_SERVER_KV_ARENA_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace flashcore::server {

// Memory of a device for K/V. Not owned.
struct KvMemory {
  std::byte* base = nullptr;
  size_t bytes = 0;
  size_t hot_bytes = 0;  // of these, at the front: what the device can keep persisting in its L2
};

using PageId = uint32_t;
inline constexpr PageId kNoPage = ~PageId{0};

// Which part of the arena.
enum class Segment : uint8_t { kHot, kCold };
inline constexpr size_t kSegments = 2;

// Not thread-safe: the SequenceStore guards it. Every operation takes constant time (amortised over
// the growth of the host's records). What a caller must not do is asserted, not reported; a PageId
// that is asked about must be of a page that lives.
class Arena {
 public:
  // Every page size is a multiple of it, and every place is counted in it, so that an int32 reaches
  // 16 TiB. It is the smallest page there is: one KV head of head_dim 32.
  static constexpr size_t kUnitBytes = 8192;

  struct Options {
    std::byte* base = nullptr;  // aligned to 64 bytes; may be memory that only the device can read
    size_t bytes = 0;           // what is left after the last whole superblock is not used
    size_t hot_bytes = 0;       // of `bytes`, at the front; rounded down to whole superblocks
    size_t superblock_bytes = size_t{4} << 20;  // a multiple of kUnitBytes
  };
  // Does not own the memory.
  explicit Arena(const Options& options);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A page of `page_bytes` (a multiple of kUnitBytes, at most max_page_bytes()) with one reference,
  // in `segment`; kNoPage if there is no room. `owner` is the caller's to interpret.
  PageId Allocate(size_t page_bytes, Segment segment, uint32_t owner);

  void AddRef(PageId page);
  // True if that was the last reference: the page is gone, and its id may be given to another.
  bool Unref(PageId page);

  uint32_t refs(PageId page) const { return pages_[page].refs; }
  uint32_t owner(PageId page) const { return pages_[page].owner; }
  size_t page_bytes(PageId page) const;
  Segment segment(PageId page) const;
  int32_t place(PageId page) const { return pages_[page].place; }  // units from base()
  std::byte* address(PageId page) const { return base_ + kUnitBytes * place(page); }

  // Exchanges the places of two pages of one size. What is stored there is the caller's to move.
  void SwapPlaces(PageId a, PageId b);

  std::byte* base() const { return base_; }
  size_t max_page_bytes() const { return superblock_bytes_; }
  size_t capacity_bytes(Segment segment) const;  // whole superblocks
  size_t used_bytes(Segment segment) const;      // of pages
  // Of the pages of `page_bytes` that `segment` can still take, exactly: in free superblocks, and
  // in those that serve this size already.
  size_t free_bytes(Segment segment, size_t page_bytes) const;
  size_t num_pages() const { return num_pages_; }  // alive

 private:
  struct SizeClass;

  // The record of a page. Without references it is that of a free slot, or a spare.
  struct Page {
    int32_t place = 0;
    uint32_t refs = 0;
    uint32_t owner = 0;
    PageId next_free = kNoPage;  // while there are no references
  };

  // A superblock is cut into slots of the page size that it serves. Slots are carved from its front
  // as they are needed. One that is free again is kept in the record of the page that was there,
  // and these records are linked: so the free slots of a superblock need no memory of their own.
  struct Superblock {
    SizeClass* size_class = nullptr;  // null while free
    uint32_t pages = 0;               // alive
    uint32_t carved = 0;              // slots
    PageId first_free = kNoPage;      // of the carved slots
    PageId last_free = kNoPage;       // so that all can become spares at once
    // In the list of free superblocks or of those of one size with room; a full one is in none.
    Superblock* previous = nullptr;
    Superblock* next = nullptr;
  };

  struct SuperblockList {
    void PushFront(Superblock* superblock);
    void Remove(Superblock* superblock);
    Superblock* first = nullptr;
  };

  // What the superblocks of one size in one segment can still take.
  struct Room {
    // Filled from the front. One that was full comes back there: it is the fullest, and those with
    // few pages are left to become empty.
    SuperblockList superblocks;
    size_t slots = 0;  // free, in all of them
  };

  // A page size in use: it lives as long as a superblock serves it.
  struct SizeClass {
    SizeClass(size_t bytes, size_t superblock_bytes)
        : page_bytes(bytes), slots(static_cast<uint32_t>(superblock_bytes / bytes)) {}

    const size_t page_bytes;
    const uint32_t slots;    // in one superblock
    size_t superblocks = 0;  // that serve it, in both segments
    std::array<Room, kSegments> room;
  };

  struct SegmentState {
    size_t superblocks = 0;
    size_t free_superblocks = 0;
    SuperblockList free;
    size_t used_bytes = 0;
  };

  static size_t Index(Segment segment) { return static_cast<size_t>(segment); }
  SegmentState& state(Segment segment) { return segments_[Index(segment)]; }
  const SegmentState& state(Segment segment) const { return segments_[Index(segment)]; }
  bool ValidSize(size_t page_bytes) const;
  bool Alive(PageId page) const { return page < pages_.size() && refs(page) > 0; }
  size_t SuperblockOf(PageId page) const { return place(page) / superblock_units_; }

  // One with room for a page of `page_bytes`; null if there is none.
  Superblock* FindSuperblock(size_t page_bytes, Segment segment);
  // Makes a free superblock serve `page_bytes`; null if there is none.
  Superblock* TakeSuperblock(size_t page_bytes, Segment segment);
  // Makes a superblock without pages free.
  void ReleaseSuperblock(Superblock* superblock, Segment segment);
  // A record with the place of a free slot in `superblock`, which has room.
  PageId TakeSlot(Superblock* superblock);
  void ReturnSlot(Superblock* superblock, PageId page);
  PageId TakeSpare();

  std::byte* const base_;
  const size_t superblock_bytes_;
  const uint32_t superblock_units_;
  std::vector<Superblock> superblocks_;  // never resized: lists point into it; the hot ones first
  std::array<SegmentState, kSegments> segments_;
  std::unordered_map<size_t, SizeClass> size_classes_;  // by page_bytes
  std::vector<Page> pages_;                             // by PageId
  PageId first_spare_ = kNoPage;                        // of pages_, those that belong to no slot
  size_t num_pages_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_ARENA_H_
