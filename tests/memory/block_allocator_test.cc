#include "server/memory/block_allocator.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

alignas(BlockAllocator::kAlignment) std::byte block[1 << 16];

TEST(BlockAllocatorTest, GivesTheFirstRangeThatIsLargeEnough) {
  BlockAllocator allocator(block, 1024);
  std::byte* const a = allocator.Allocate(100);  // takes 128
  std::byte* const b = allocator.Allocate(64);
  std::byte* const c = allocator.Allocate(832);
  EXPECT_EQ(a, block);
  EXPECT_EQ(b, block + 128);
  EXPECT_EQ(c, block + 192);
  EXPECT_EQ(allocator.Allocate(1), nullptr);
  allocator.Free(a);
  EXPECT_EQ(allocator.Allocate(129), nullptr);
  EXPECT_EQ(allocator.Allocate(1), a);
}

TEST(BlockAllocatorTest, FreeRangesThatTouchBecomeOneInAnyOrder) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    BlockAllocator allocator(block, 1024);
    std::vector<std::byte*> pieces;
    for (int i = 0; i < 4; ++i) pieces.push_back(allocator.Allocate(256));
    for (const int i : order) allocator.Free(pieces[i]);
    EXPECT_EQ(allocator.Allocate(1024), block);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(BlockAllocatorTest, PiecesNeverOverlap) {
  struct Piece {
    std::byte* at;
    size_t bytes;
    std::byte fill;
  };
  std::mt19937 random(TestSeed());
  BlockAllocator allocator(block, sizeof(block));
  std::vector<Piece> pieces;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % 5000;
      std::byte* const at = allocator.Allocate(bytes);
      if (at == nullptr) continue;
      ASSERT_LE(at + bytes, block + sizeof(block));
      pieces.push_back({at, bytes, static_cast<std::byte>(random())});
      std::memset(at, static_cast<int>(pieces.back().fill), bytes);
    } else if (!pieces.empty()) {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const Piece piece = pieces.back();
      pieces.pop_back();
      for (size_t i = 0; i < piece.bytes; ++i) ASSERT_EQ(piece.at[i], piece.fill);
      allocator.Free(piece.at);
    }
  }
  for (const Piece& piece : pieces) allocator.Free(piece.at);
  EXPECT_EQ(allocator.Allocate(sizeof(block)), block);
}

}  // namespace
}  // namespace flashcore::server
