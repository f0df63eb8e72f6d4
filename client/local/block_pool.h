// Registered memory of a client, for rings and for tensors that lie elsewhere. Internal to the
// clients.
#ifndef FLASHCORE_CLIENT_LOCAL_BLOCK_POOL_H_
#define FLASHCORE_CLIENT_LOCAL_BLOCK_POOL_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "client/local/connection.h"
#include "client/local/memory.h"
#include "client/local/timed_mutex.h"

namespace flashcore::client::local {

// Gives out blocks of a few registered regions, first fit. A region is made when no other has room,
// and is kept for reuse. Thread-safe; outlives its blocks.
class BlockPool {
 public:
  static constexpr size_t kAlignment = 64;
  // Size of a region, unless a block needs more. The first also has the rings: a server counts
  // regions.
  static constexpr size_t kRegionBytes = size_t{2} << 20;

  explicit BlockPool(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  class Block;

  // A ring in this pool, in `*block`, which outlives it.
  Status Open(uint32_t slots, uint32_t slot_bytes, SteadyTime deadline, Block* block,
              std::unique_ptr<OpenRing>* ring);

  // RESOURCE_EXHAUSTED if the server or this host has no more memory for this client.
  Status Allocate(size_t bytes, SteadyTime deadline, Block* block);

 private:
  struct Free {
    size_t offset, bytes;
  };
  struct Chunk {
    Memory memory;
    std::string id;
    std::vector<Free> free;  // ascending, never adjacent

    bool Unused() const { return free.size() == 1 && free[0].bytes == memory.bytes(); }
  };

  bool Take(size_t bytes, Block* block);
  Status Grow(size_t bytes, SteadyTime deadline);
  bool DropUnused();
  void Return(Chunk* chunk, size_t offset, size_t bytes);

  const std::shared_ptr<Connection> connection_;
  TimedMutex grow_mutex_;  // one registration at a time
  std::mutex mutex_;
  std::vector<std::unique_ptr<Chunk>> chunks_;  // with mutex_
};

// Memory of a pool; goes back to it when destroyed. May be empty.
class BlockPool::Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(chunk_, other.chunk_);
    std::swap(offset_, other.offset_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Block() { Reset(); }

  void Reset() {
    if (pool_ != nullptr) std::exchange(pool_, nullptr)->Return(chunk_, offset_, bytes_);
  }

  std::byte* data() const { return chunk_->memory.data() + offset_; }
  const std::string& region_id() const { return chunk_->id; }
  size_t offset() const { return offset_; }  // in the region

 private:
  friend class BlockPool;

  BlockPool* pool_ = nullptr;  // null: empty
  Chunk* chunk_ = nullptr;
  size_t offset_ = 0;
  size_t bytes_ = 0;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_BLOCK_POOL_H_
