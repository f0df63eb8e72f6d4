// The pages of one device: who shares them, which client pays for them, and when the memory of a
// dropped page may be used again.
#ifndef FLASHCORE_SERVER_KV_PAGE_POOL_H_
#define FLASHCORE_SERVER_KV_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "server/kv/arena.h"

namespace flashcore::server {

struct Sequence;  // sequence.h

// The pages of one client. It exists while it holds anything.
struct KvClient {
  std::string name;           // of the identity
  size_t kv_bytes = 0;        // pages that the client pays for
  size_t metadata_bytes = 0;  // of its sequences
  // References to pages that other clients own, by page.
  absl::flat_hash_map<PageId, uint32_t> borrowed;
  // The SequenceTable's.
  std::map<uint64_t, std::shared_ptr<Sequence>> sequences;  // by serial
  std::list<std::shared_ptr<Sequence>> by_use;              // least recently used first
};

// An Arena with clients and deferred frees. A client pays for each page that its sequences use,
// once. The client that allocated a page owns it; clients that share it borrow it and pay for it
// too, so nobody can hold a page at the cost of another. A page has no owner once only borrowers
// use it. Not thread-safe: the SequenceStore's mutex guards it. Does not own the memory.
class PagePool {
 public:
  PagePool(const KvMemory& memory, size_t superblock_bytes) : arena_(memory, superblock_bytes) {}

  // Makes a client if there is none. CloseIfEmpty deletes it when the client holds nothing; the
  // pool calls that itself when it frees a page.
  KvClient* OpenClient(absl::string_view name);
  const KvClient* FindClient(absl::string_view name) const;  // null if there is none
  const std::map<std::string, KvClient, std::less<>>& clients() const { return clients_; }
  void CloseIfEmpty(KvClient* client);

  // A page with one reference, in segment `preferred`, or in the other one if that is full. kNoPage
  // if both are.
  PageId Allocate(size_t page_bytes, Segment preferred, KvClient* client);
  // A page in `segment` that nobody pays for.
  PageId AllocateUnpaid(size_t page_bytes, Segment segment) {
    return arena_.Allocate(page_bytes, segment, nullptr);
  }

  // A reference of `client`; null: one that nobody pays for.
  void AddRef(PageId page, KvClient* client);
  void Unref(PageId page, KvClient* client);
  // The owner's reference.
  void Unref(PageId page) { Unref(page, static_cast<KvClient*>(arena_.owner(page))); }
  // Unref when every launch that is running now has ended: until then it may use the page.
  void UnrefAfterLaunches(PageId page, KvClient* client);
  void SwapPlaces(PageId a, PageId b) {
    arena_.SwapPlaces(a, b);
    ++moves_;
  }
  // Changes whenever the place of a page that is alive changes.
  uint64_t moves() const { return moves_; }

  // A launch may use every page that is alive between these calls. Ids ascend from 1.
  uint64_t BeginLaunch();
  void EndLaunch(uint64_t launch);

  // See Arena.
  bool GiveBackUnneeded(TimePoint now) { return arena_.GiveBackUnneeded(now); }

  // True if at least a quarter of the hot segment is free space that pages have left since the last
  // time this was true. The L2 still keeps lines of that space, which nobody reads.
  bool ShouldResetPersistingL2();

  const Arena& arena() const { return arena_; }

 private:
  struct DeferredUnref {
    uint64_t launch;  // due when no launch up to this one is running
    PageId page;
    KvClient* client;  // open, because it pays for the page
  };

  void EndBorrow(PageId page, KvClient* client);
  uint32_t borrowed(PageId page) const;  // references of clients that do not own it

  Arena arena_;
  std::map<std::string, KvClient, std::less<>> clients_;  // by client
  absl::flat_hash_map<PageId, uint32_t> borrowed_;        // of all clients, by page
  uint64_t moves_ = 0;
  uint64_t last_launch_ = 0;
  std::vector<uint64_t> running_;  // launches, ascending
  std::deque<DeferredUnref> deferred_;
  size_t left_hot_bytes_ = 0;  // by pages, since the last L2 reset
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_PAGE_POOL_H_
