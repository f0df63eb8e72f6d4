// The pages of one device: who shares them, which client pays for them, and when the memory of a
// dropped page may be used again.
#ifndef FLASHCORE_SERVER_KV_PAGE_POOL_H_
#define FLASHCORE_SERVER_KV_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/kv/arena.h"

namespace flashcore::server {

struct Sequence;  // sequence.h

// What one client holds. It exists while it holds anything.
struct ClientAccount {
  std::string client;
  size_t kv_bytes = 0;                                      // pages that the client pays for
  std::map<uint64_t, std::shared_ptr<Sequence>> sequences;  // by serial, the SequenceTable's
};

// An Arena with accounts and deferred frees. The client whose sequence allocated a page pays for it
// until the last sequence that shares it drops it. Not thread-safe: the SequenceStore's mutex
// guards it. Does not own the memory.
class PagePool {
 public:
  PagePool(const KvMemory& memory, size_t superblock_bytes) : arena_(memory, superblock_bytes) {}

  // Makes an account if there is none. CloseIfEmpty deletes it when the client holds nothing; the
  // pool calls that itself when it frees a page.
  ClientAccount* OpenAccount(absl::string_view client);
  const ClientAccount* FindAccount(absl::string_view client) const;  // null if there is none
  void CloseIfEmpty(ClientAccount* account);

  // A page with one reference, in segment `preferred`, or in the other one if that is full. kNoPage
  // if both are.
  PageId Allocate(size_t page_bytes, Segment preferred, ClientAccount* account);
  // A page in `segment` that nobody pays for.
  PageId AllocateUnpaid(size_t page_bytes, Segment segment) {
    return arena_.Allocate(page_bytes, segment, nullptr);
  }

  void AddRef(PageId page) { arena_.AddRef(page); }
  void Unref(PageId page);
  // Unref when every launch that is running now has ended: until then it may use the page.
  void UnrefAfterLaunches(PageId page);
  void SwapPlaces(PageId a, PageId b) { arena_.SwapPlaces(a, b); }

  // A launch may use every page that is alive between these calls. Ids ascend from 1.
  uint64_t BeginLaunch();
  void EndLaunch(uint64_t launch);

  // True if at least a quarter of the hot segment is free space that pages have left since the last
  // time this was true. The L2 still keeps lines of that space, which nobody reads.
  bool ShouldResetPersistingL2();

  const Arena& arena() const { return arena_; }

 private:
  struct DeferredUnref {
    uint64_t launch;  // due when no launch up to this one is running
    PageId page;
  };

  Arena arena_;
  std::map<std::string, ClientAccount, std::less<>> accounts_;  // by client
  uint64_t last_launch_ = 0;
  std::vector<uint64_t> running_;  // launches, ascending
  std::deque<DeferredUnref> deferred_;
  size_t left_hot_bytes_ = 0;  // by pages, since the last L2 reset
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_PAGE_POOL_H_
