// A fixed set of threads that share the iterations of one loop at a time.
#ifndef FLASHCORE_KERNELS_CPU_THREAD_POOL_H_
#define FLASHCORE_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace flashcore::kernels {

// Thread-compatible: one ParallelFor at a time. The calling thread works too, so a pool of one
// thread starts none.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn(i, thread) for every i in [0, n), in no fixed order, and returns when all are done.
  // `thread` is in [0, num_threads()) and unique among the calls that run at the same time.
  void ParallelFor(int n, const std::function<void(int i, int thread)>& fn);

 private:
  void WorkerMain(int thread);
  bool RunOne(int thread);  // claims and runs one iteration; false if none is left
  bool HasWork() const;
  void WaitForWork();
  void WaitForDone();

  // Iterations of the current loop that nobody has claimed yet (low 32 bits) and the number of the
  // loop (high 32 bits). Claiming is a compare-and-swap of both, so a worker that wakes late can
  // never claim from a loop that it has not seen; holding a claim keeps n_ and fn_ as they are.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};  // iterations of the current loop still to be finished
  std::atomic<bool> stop_{false};
  int n_ = 0;                                          // written between loops only
  const std::function<void(int, int)>* fn_ = nullptr;  // written between loops only

  std::mutex mutex_;  // orders changes of the atomics with going to sleep
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_THREAD_POOL_H_
