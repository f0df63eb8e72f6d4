#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
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

// Whether every other thread of this process is blocked: state S in /proc, after the name in ().
bool OtherThreadsSleep() {
  const std::string self = std::to_string(gettid());
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == self) continue;
    std::ifstream file(task.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.compare(name_end, 3, ") S") != 0) return false;
  }
  return true;
}

TEST(ThreadPool, WakesUpAfterItFellAsleep) {
  ThreadPool pool(2);
  for (int loop = 0; loop < 3; ++loop) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!OtherThreadsSleep()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "the pool's thread does not block";
      std::this_thread::yield();
    }
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
