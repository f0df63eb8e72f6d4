#include "server/core/staging_pool.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

TEST(StagingPoolTest, SizeClassesWasteAtMostAQuarter) {
  EXPECT_EQ(StagingPool::SizeClass(1), 4096u);
  EXPECT_EQ(StagingPool::SizeClass(4096), 4096u);
  EXPECT_EQ(StagingPool::SizeClass(4097), 5120u);
  EXPECT_EQ(StagingPool::SizeClass(8192), 8192u);
  for (size_t bytes = 5000; bytes < 100'000'000; bytes = bytes * 9 / 8 + 3) {
    const size_t capacity = StagingPool::SizeClass(bytes);
    EXPECT_GE(capacity, bytes);
    EXPECT_LE(capacity, bytes + bytes / 4 + 1) << bytes;
    EXPECT_EQ(capacity % StagingPool::kAlignment, 0u) << bytes;
    EXPECT_EQ(StagingPool::SizeClass(capacity), capacity) << bytes;
  }
}

TEST(StagingPoolTest, KeepsReturnedBuffersForReuse) {
  StagingPool pool(1 << 20, StagingPool::HeapAllocator());
  std::byte* first = nullptr;
  {
    StagingBuffer buffer = *pool.Lend(5000);
    first = buffer.data();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % StagingPool::kAlignment, 0u);
    EXPECT_EQ(buffer.capacity(), 5120u);
    EXPECT_EQ(pool.used_bytes(), 5120u);
    EXPECT_EQ(pool.free_bytes(), 0u);
  }
  EXPECT_EQ(pool.used_bytes(), 0u);
  EXPECT_EQ(pool.free_bytes(), 5120u);
  StagingBuffer again = *pool.Lend(4500);
  EXPECT_EQ(again.data(), first);
}

TEST(StagingPoolTest, RefusesBeyondTheLimitAndSaysSo) {
  StagingPool pool(16384, StagingPool::HeapAllocator());
  StagingBuffer held = *pool.Lend(8192);
  const auto refused = pool.Lend(8193);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("needs 8193 bytes; 8192 of 16384 are in use"));
  EXPECT_TRUE(pool.Lend(8192).ok());
  EXPECT_EQ(pool.Lend(SIZE_MAX).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(StagingPoolTest, GivesUpKeptBuffersOfOtherSizesBeforeRefusing) {
  StagingPool pool(16384, StagingPool::HeapAllocator());
  { StagingBuffer a = *pool.Lend(4096), b = *pool.Lend(8192); }
  EXPECT_EQ(pool.free_bytes(), 12288u);
  StagingBuffer big = *pool.Lend(16384);
  EXPECT_EQ(pool.used_bytes(), 16384u);
  EXPECT_EQ(pool.free_bytes(), 0u);
}

TEST(StagingPoolTest, ReportsAnAllocatorThatFails) {
  StagingPool pool(1 << 20, {[](size_t) -> void* { return nullptr; }, [](void*) {}});
  EXPECT_EQ(pool.Lend(1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.used_bytes(), 0u);
}

TEST(StagingPoolTest, NothingCostsNothing) {
  StagingPool pool(4096, StagingPool::HeapAllocator());
  const StagingBuffer buffer = *pool.Lend(0);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(pool.used_bytes(), 0u);
}

TEST(StagingPoolTest, ManyThreadsStayWithinTheLimit) {
  const size_t limit = 1 << 20;
  std::atomic<size_t> allocated{0};
  {
    std::vector<std::thread> threads;
    StagingPool::Allocator heap = StagingPool::HeapAllocator();
    StagingPool pool(limit, {[&](size_t bytes) {
                               ++allocated;
                               return heap.allocate(bytes);
                             },
                             [&](void* memory) {
                               --allocated;
                               heap.free(memory);
                             }});
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&pool, limit, seed] {
        std::mt19937 random(seed);
        std::vector<StagingBuffer> held;
        for (int i = 0; i < 5000; ++i) {
          auto buffer = pool.Lend(random() % 100'000);
          if (buffer.ok()) {
            if (buffer->data() != nullptr) std::memset(buffer->data(), i, 64);
            held.push_back(*std::move(buffer));
          }
          if (held.size() > random() % 8) held.erase(held.begin());
          EXPECT_LE(pool.used_bytes(), limit);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool.used_bytes(), 0u);
    EXPECT_LE(pool.free_bytes(), limit);
  }
  EXPECT_EQ(allocated, 0u);
}

}  // namespace
}  // namespace flashcore::server
