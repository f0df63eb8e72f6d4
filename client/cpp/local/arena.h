// Registered memory of the client, for rings and for tensors that lie elsewhere. Internal to the
// client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_ARENA_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_ARENA_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/control.h"
#include "client/cpp/local/region.h"
#include "client/cpp/local/timed_mutex.h"

namespace flashcore::client::local {

// Gives out blocks of a few registered regions, first fit. A region is made when no other has room,
// and is kept for reuse. Thread-safe; outlives its blocks.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;
  // Of a region, unless a block needs more. The first also has the rings: a server counts regions.
  static constexpr size_t kRegionBytes = size_t{2} << 20;

  explicit Arena(std::shared_ptr<Control> control) : control_(std::move(control)) {}

  class Block;

  // A ring in this arena, in `*block`, which outlives it.
  absl::StatusOr<std::unique_ptr<OpenRing>> Open(uint32_t slots, uint32_t slot_bytes,
                                                 absl::Time deadline, Block* block);

  // RESOURCE_EXHAUSTED if the server or this host has no more memory for this client.
  absl::StatusOr<Block> Allocate(size_t bytes, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Free {
    size_t offset, bytes;
  };
  struct Chunk {
    std::unique_ptr<Region> region;
    std::string id;
    std::vector<Free> free;  // ascending, never adjacent

    bool Unused() const { return free.size() == 1 && free[0].bytes == region->bytes(); }
  };

  bool Take(size_t bytes, Block* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Grow(size_t bytes, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  bool DropUnused() ABSL_LOCKS_EXCLUDED(mutex_);
  void Return(Chunk* chunk, size_t offset, size_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<Control> control_;
  TimedMutex grow_mutex_;  // one registration at a time
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Chunk>> chunks_ ABSL_GUARDED_BY(mutex_);
};

// Memory of an arena; goes back to it when destroyed. May be empty.
class Arena::Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(chunk_, other.chunk_);
    std::swap(offset_, other.offset_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Block() { Reset(); }

  void Reset() {
    if (arena_ != nullptr) std::exchange(arena_, nullptr)->Return(chunk_, offset_, bytes_);
  }

  std::byte* data() const { return chunk_->region->data() + offset_; }
  const std::string& region_id() const { return chunk_->id; }
  size_t offset() const { return offset_; }  // in the region

 private:
  friend class Arena;

  Arena* arena_ = nullptr;  // null: empty
  Chunk* chunk_ = nullptr;
  size_t offset_ = 0;
  size_t bytes_ = 0;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_ARENA_H_
