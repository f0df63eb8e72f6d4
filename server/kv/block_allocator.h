// Pieces of one block of memory.
#ifndef FLASHCORE_SERVER_KV_BLOCK_ALLOCATOR_H_
#define FLASHCORE_SERVER_KV_BLOCK_ALLOCATOR_H_

#include <cstddef>
#include <map>
#include <unordered_map>

namespace flashcore::server {

// Hands out pieces of a block that somebody else owns, for memory that is slow to get: the first
// free range that is large enough, so that what is used stays together at the front. Free ranges
// that touch become one. Not thread-safe.
class BlockAllocator {
 public:
  static constexpr size_t kAlignment = 64;  // of the block and of every piece

  BlockAllocator(std::byte* block, size_t bytes) : block_(block), free_{{0, bytes}} {}
  BlockAllocator(const BlockAllocator&) = delete;
  BlockAllocator& operator=(const BlockAllocator&) = delete;

  // Null if no free range has `bytes`, which is more than 0.
  std::byte* Allocate(size_t bytes);
  // `piece` is one that was allocated and not freed.
  void Free(std::byte* piece);

 private:
  std::byte* const block_;
  std::map<size_t, size_t> free_;            // from offset to bytes; no two touch
  std::unordered_map<size_t, size_t> used_;  // likewise
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_BLOCK_ALLOCATOR_H_
