#include "client/cpp/local/arena.h"

#include <algorithm>

#include "proto/wire/ring.h"

namespace flashcore::client::local {

absl::StatusOr<std::unique_ptr<OpenRing>> Arena::Open(uint32_t slots, uint32_t slot_bytes,
                                                      absl::Time deadline, Block* block) {
  absl::StatusOr<Block> memory = Allocate(wire::RingBytes(slots, slot_bytes), deadline);
  if (!memory.ok()) return memory.status();
  *block = *std::move(memory);
  return OpenRing::Open(control_, block->data(), block->region_id(), block->offset(), slots,
                        slot_bytes, deadline);
}

absl::StatusOr<Arena::Block> Arena::Allocate(size_t bytes, absl::Time deadline) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Block block;
  {
    absl::MutexLock lock(&mutex_);
    if (Take(bytes, &block)) return block;
  }
  const TimedMutex::Lock grow_lock(&grow_mutex_, deadline);
  if (!grow_lock.status().ok()) return grow_lock.status();
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (Take(bytes, &block)) return block;  // another thread has made room
    }
    absl::Status status = Grow(bytes, deadline);
    // Unused regions that are too small may be what the quota is spent on.
    if (absl::IsResourceExhausted(status) && DropUnused()) status = Grow(bytes, deadline);
    if (!status.ok()) return status;
  }
}

bool Arena::Take(size_t bytes, Block* block) {
  for (const auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk->free.size(); ++i) {
      Free& free = chunk->free[i];
      if (free.bytes < bytes) continue;
      block->arena_ = this;
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

absl::Status Arena::Grow(size_t bytes, absl::Time deadline) {
  absl::StatusOr<std::unique_ptr<Region>> region = Region::Create(std::max(bytes, kRegionBytes));
  if (!region.ok()) return region.status();
  absl::StatusOr<std::string> id =
      control_->Register((*region)->fd(), (*region)->bytes(), /*read_only=*/false, deadline);
  if (!id.ok()) return id.status();
  auto chunk = std::make_unique<Chunk>();
  chunk->free = {{0, (*region)->bytes()}};
  chunk->region = *std::move(region);
  chunk->id = *std::move(id);
  absl::MutexLock lock(&mutex_);
  chunks_.push_back(std::move(chunk));
  return absl::OkStatus();
}

bool Arena::DropUnused() {
  std::vector<std::unique_ptr<Chunk>> unused;
  {
    absl::MutexLock lock(&mutex_);
    const auto first = std::stable_partition(chunks_.begin(), chunks_.end(),
                                             [](const auto& chunk) { return !chunk->Unused(); });
    unused.assign(std::make_move_iterator(first), std::make_move_iterator(chunks_.end()));
    chunks_.erase(first, chunks_.end());
  }
  for (const auto& chunk : unused) control_->Unregister(chunk->id);
  return !unused.empty();
}

void Arena::Return(Chunk* chunk, size_t offset, size_t bytes) {
  absl::MutexLock lock(&mutex_);
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
