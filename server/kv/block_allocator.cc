#include "server/kv/block_allocator.h"

#include <algorithm>
#include <iterator>

#include "server/base/align.h"

namespace flashcore::server {

std::byte* BlockAllocator::Allocate(size_t bytes) {
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

void BlockAllocator::Free(std::byte* piece) {
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

}  // namespace flashcore::server
