// A fixed set of threads that run the iterations of one loop at a time.
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

// Thread-compatible: one ParallelFor at a time. The calling thread works too: a pool of one thread
// starts no thread.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs fn(i, thread) for every i in [0, n), in no fixed order, and returns when all are done.
  // `thread` is in [0, num_threads()) and unique among concurrent calls of fn.
  void ParallelFor(int n, const std::function<void(int i, int thread)>& fn);

 private:
  void WorkerMain(int thread);
  bool RunOne(int thread);  // claims and runs one iteration; false if none is left
  bool HasWork() const;
  void WaitForWork();
  void WaitForDone();

  // Unclaimed iterations of the current loop (low 32 bits) and the loop's number (high 32 bits). A
  // claim is a compare-and-swap of both, so a worker that wakes late cannot claim from a newer loop
  // by mistake. While a claim is held, n_ and fn_ do not change.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> unfinished_{0};  // iterations of the current loop that have not finished
  std::atomic<bool> stop_{false};
  int n_ = 0;                                          // written only between loops
  const std::function<void(int, int)>* fn_ = nullptr;  // written only between loops

  std::mutex mutex_;  // locked before every notify, so that no wake-up is lost
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CPU_THREAD_POOL_H_
