// Hands out pieces of one block of memory.
#ifndef FLASHCORE_SERVER_MEMORY_BLOCK_ALLOCATOR_H_
#define FLASHCORE_SERVER_MEMORY_BLOCK_ALLOCATOR_H_

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <unordered_map>

namespace flashcore::server {

// Rounds `bytes` up to a multiple of `alignment`.
constexpr size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// For memory that is slow to allocate, such as pinned memory. A piece is taken from the first free
// range that is large enough, so that used memory stays together at the front of the block.
// Adjacent free ranges are merged. Does not own the block. Not thread-safe.
class BlockAllocator {
 public:
  static constexpr size_t kAlignment = 64;  // of the block and of every piece

  BlockAllocator(std::byte* block, size_t bytes) : block_(block), free_{{0, bytes}} {}
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // Null if no free range has `bytes`, which must not be 0.
  std::byte* Allocate(size_t bytes) {
    bytes = AlignUp(bytes, kAlignment);
    const auto range = std::find_if(free_.begin(), free_.end(),
                                    [bytes](const auto& free) { return free.second >= bytes; });
    if (range == free_.end()) return nullptr;
    const auto [offset, size] = *range;
    free_.erase(range);
    if (size > bytes) free_.emplace(offset + bytes, size - bytes);
    used_.emplace(offset, bytes);
    return block_ + offset;
  }

  // `piece` was allocated and has not been freed.
  void Free(std::byte* piece) {
    const auto used = used_.find(static_cast<size_t>(piece - block_));
    auto [offset, bytes] = *used;
    used_.erase(used);
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && offset + bytes == after->first) {
      bytes += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_.emplace_hint(after, offset, bytes);
  }

 private:
  std::byte* const block_;
  std::map<size_t, size_t> free_;            // from offset to bytes; no two ranges are adjacent
  std::unordered_map<size_t, size_t> used_;  // from offset to bytes
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_BLOCK_ALLOCATOR_H_
