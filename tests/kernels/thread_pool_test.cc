#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace flashcore::kernels {
namespace {

TEST(ThreadPool, RunsEveryIterationOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int n : {0, 1, 2, 3, 7, 1000}) {
      std::vector<int> runs(n, 0);  // each element is one iteration's own
      pool.ParallelFor(n, [&](int i, int) { ++runs[i]; });
      for (int i = 0; i < n; ++i) EXPECT_EQ(runs[i], 1);
    }
  }
}

TEST(ThreadPool, ThreadNumbersAreInRangeAndNeverShared) {
  ThreadPool pool(4);
  std::vector<int> busy(4, 0);  // not atomic on purpose: a shared number is a race and a failure
  for (int loop = 0; loop < 50; ++loop) {
    pool.ParallelFor(64, [&](int, int thread) {
      ASSERT_GE(thread, 0);
      ASSERT_LT(thread, 4);
      EXPECT_EQ(busy[thread]++, 0);
      --busy[thread];
    });
  }
}

TEST(ThreadPool, WritesAreVisibleWhenTheLoopReturns) {
  ThreadPool pool(3);
  int64_t total = 0;
  std::vector<int> values(100);
  for (int loop = 1; loop <= 2000; ++loop) {
    pool.ParallelFor(100, [&](int i, int) { values[i] = loop; });
    for (int value : values) total += value - loop;
  }
  EXPECT_EQ(total, 0);
}

TEST(ThreadPool, SharesTheWork) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  // Each iteration waits for the other, so they can only end if two threads run them.
  pool.ParallelFor(2, [&](int, int) {
    ++inside;
    while (inside.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(inside.load(), 2);
}

TEST(ThreadPool, WakesUpAfterItFellAsleep) {
  ThreadPool pool(2);
  for (int loop = 0; loop < 3; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // far longer than it spins
    std::atomic<int> inside{0};
    pool.ParallelFor(2, [&](int, int) {
      ++inside;
      while (inside.load() < 2) std::this_thread::yield();
    });
  }
}

TEST(ThreadPool, StopsWhetherUsedOrNot) {
  for (int loop = 0; loop < 20; ++loop) {
    auto pool = std::make_unique<ThreadPool>(3);
    if (loop % 2 == 0) pool->ParallelFor(5, [](int, int) {});
  }
}

}  // namespace
}  // namespace flashcore::kernels
