#include "client/local/block_pool.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "proto/wire/ring.h"

namespace flashcore::client::local {

Status BlockPool::Open(uint32_t slots, uint32_t slot_bytes, SteadyTime deadline, Block* block,
                       std::unique_ptr<OpenRing>* ring) {
  const size_t bytes = wire::RingBytes(slots, slot_bytes);
  Status status = Allocate(bytes, deadline, block);
  if (!status.ok()) return status;
  std::memset(block->data(), 0, bytes);
  return OpenRing::Open(connection_, block->data(), block->region_id(), block->offset(), slots,
                        slot_bytes, deadline, ring);
}

Status BlockPool::Allocate(size_t bytes, SteadyTime deadline, Block* block) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Block found;
  const auto take = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return Take(bytes, &found);
  };
  if (!take()) {
    const TimedMutex::Lock grow_lock(&grow_mutex_, deadline);
    Status status = grow_lock.status();
    while (status.ok() && !take()) {  // another thread may have made room
      status = Grow(bytes, deadline);
      // Unused regions that are too small may be what the quota is spent on.
      if (status.code == kResourceExhausted && DropUnused()) status = Grow(bytes, deadline);
    }
    if (!status.ok()) return status;
  }
  *block = std::move(found);
  return {};
}

bool BlockPool::Take(size_t bytes, Block* block) {
  for (const auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk->free.size(); ++i) {
      Free& free = chunk->free[i];
      if (free.bytes < bytes) continue;
      block->pool_ = this;
      block->chunk_ = chunk.get();
      block->offset_ = free.offset;
      block->bytes_ = bytes;
      free.offset += bytes;
      free.bytes -= bytes;
      if (free.bytes == 0) chunk->free.erase(chunk->free.begin() + static_cast<ptrdiff_t>(i));
      return true;
    }
  }
  return false;
}

Status BlockPool::Grow(size_t bytes, SteadyTime deadline) {
  auto chunk = std::make_unique<Chunk>();
  Status status = Memory::Create(std::max(bytes, kRegionBytes), &chunk->memory);
  if (status.ok()) {
    status = connection_->Register(chunk->memory, /*read_only=*/false, deadline, &chunk->id);
  }
  if (!status.ok()) return status;
  chunk->free = {{0, chunk->memory.bytes()}};
  const std::lock_guard<std::mutex> lock(mutex_);
  chunks_.push_back(std::move(chunk));
  return {};
}

bool BlockPool::DropUnused() {
  std::vector<std::unique_ptr<Chunk>> unused;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto first = std::stable_partition(chunks_.begin(), chunks_.end(),
                                             [](const auto& chunk) { return !chunk->Unused(); });
    unused.assign(std::make_move_iterator(first), std::make_move_iterator(chunks_.end()));
    chunks_.erase(first, chunks_.end());
  }
  for (const auto& chunk : unused) connection_->Unregister(chunk->id);
  return !unused.empty();
}

void BlockPool::Return(Chunk* chunk, size_t offset, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Free>& free = chunk->free;
  const auto after =
      std::find_if(free.begin(), free.end(), [&](const Free& f) { return f.offset > offset; });
  const bool joins_after = after != free.end() && offset + bytes == after->offset;
  const bool joins_before =
      after != free.begin() && std::prev(after)->offset + std::prev(after)->bytes == offset;
  if (joins_before) {
    std::prev(after)->bytes += bytes + (joins_after ? after->bytes : 0);
    if (joins_after) free.erase(after);
  } else if (joins_after) {
    after->offset = offset;
    after->bytes += bytes;
  } else {
    free.insert(after, {offset, bytes});
  }
}

}  // namespace flashcore::client::local
