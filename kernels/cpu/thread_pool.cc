#include "kernels/cpu/thread_pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashcore::kernels {
namespace {

// Spins before blocking: tens of microseconds, about the cost of waking a blocked thread. Loops in
// quick succession pay for no wake-up, and an idle pool leaves its cores free.
constexpr int kSpins = 1000;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

template <class Predicate>
bool SpinUntil(const Predicate& predicate) {
  for (int i = 0; i < kSpins; ++i) {
    if (predicate()) return true;
    Pause();
  }
  return false;
}

constexpr uint64_t kCountMask = 0xffffffffu;
constexpr uint64_t kOneLoop = uint64_t{1} << 32;

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { WorkerMain(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true, std::memory_order_release);
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int n, const std::function<void(int i, int thread)>& fn) {
  if (n <= 1 || workers_.empty()) {
    for (int i = 0; i < n; ++i) fn(i, 0);
    return;
  }
  n_ = n;
  fn_ = &fn;
  unfinished_.store(n, std::memory_order_relaxed);
  const uint64_t loop = (ticket_.load(std::memory_order_relaxed) & ~kCountMask) + kOneLoop;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ticket_.store(loop | static_cast<uint32_t>(n), std::memory_order_release);
  }
  work_.notify_all();
  while (RunOne(0)) {
  }
  WaitForDone();
}

void ThreadPool::WorkerMain(int thread) {
  while (!stop_.load(std::memory_order_acquire)) {
    if (!RunOne(thread)) WaitForWork();
  }
}

bool ThreadPool::RunOne(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if ((ticket & kCountMask) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
  const int remaining = static_cast<int>(ticket & kCountMask);
  (*fn_)(n_ - remaining, thread);
  if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1 && thread != 0) {
    // With the mutex held, the caller is either asleep or has yet to check unfinished_.
    std::lock_guard<std::mutex> lock(mutex_);
    done_.notify_one();
  }
  return true;
}

bool ThreadPool::HasWork() const {
  return (ticket_.load(std::memory_order_acquire) & kCountMask) != 0 ||
         stop_.load(std::memory_order_acquire);
}

void ThreadPool::WaitForWork() {
  if (SpinUntil([this] { return HasWork(); })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait(lock, [this] { return HasWork(); });
}

void ThreadPool::WaitForDone() {
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (SpinUntil(finished)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, finished);
}

}  // namespace flashcore::kernels
