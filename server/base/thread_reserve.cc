#include "server/base/thread_reserve.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "server/base/mutex.h"
#include "server/base/process_limits.h"

namespace flashcore::server {
namespace {

// So much in any case, whatever `ulimit -s` says: the stack of a thread of the reserve.
constexpr size_t kStackBytes = size_t{2} << 20;

using Body = void* (*)(void*);

// A thread's work, and what it inherits from the thread that makes it.
struct Job {
  Body body = nullptr;
  void* argument = nullptr;
  bool detached = false;
  cpu_set_t cores;
  sigset_t signals;
};

int RealCreate(pthread_t* thread, const pthread_attr_t* attributes, Body body, void* argument) {
  static auto* const next =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, body, argument);
}

// Thread-safe. Lasts as long as the process, since its threads do.
class Reserve {
 public:
  static Reserve* Get() {
    static auto* const reserve = new Reserve;
    return reserve;
  }

  // How many it could make; the error of the first that failed in `error`, 0: none did.
  int Add(int threads, int* error) ABSL_LOCKS_EXCLUDED(mutex_) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    int made = 0;
    for (*error = 0; made < threads; ++made) {
      auto* const waiting = new Waiting;
      *error = RealCreate(&waiting->thread, &attributes, &Reserve::Run, waiting);
      if (*error != 0) {
        delete waiting;
        break;
      }
      Park(waiting);
    }
    pthread_attr_destroy(&attributes);
    return made;
  }

  // False: none is left.
  bool Take(const Job& job, pthread_t* thread) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (waiting_.empty()) return false;
    Waiting* const taken = waiting_.back();
    waiting_.pop_back();
    *thread = taken->thread;
    taken->job = job;
    taken->wake.NotifyAll();
    return true;
  }

  int size() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return static_cast<int>(waiting_.size());
  }

 private:
  struct Waiting {
    pthread_t thread;
    Job job;  // without a body: none yet
    CondVar wake;
  };

  void Park(Waiting* waiting) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    waiting_.push_back(waiting);
  }

  Job WaitForJob(Waiting* waiting) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    while (waiting->job.body == nullptr) waiting->wake.Wait(&mutex_);
    Job job = waiting->job;
    waiting->job.body = nullptr;
    return job;
  }

  static void* Run(void* argument) {
    auto* const self = static_cast<Waiting*>(argument);
    while (true) {
      const Job job = Get()->WaitForJob(self);
      sched_setaffinity(0, sizeof(job.cores), &job.cores);
      pthread_sigmask(SIG_SETMASK, &job.signals, nullptr);
      if (!job.detached) {
        delete self;
        return job.body(job.argument);
      }
      job.body(job.argument);
      Get()->Park(self);
    }
  }

  Mutex mutex_;
  std::vector<Waiting*> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

#ifdef FLASHCORE_SANITIZER

absl::Status ReserveThreads(int /*threads*/) { return absl::OkStatus(); }

#else

namespace {

size_t StackBytes(const pthread_attr_t* attributes) {
  size_t bytes = 0;
  pthread_attr_getstacksize(attributes, &bytes);
  return bytes;
}

// The stack of a thread whose maker does not set it; pthread_attr_init has it.
size_t DefaultStackBytes() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  const size_t bytes = StackBytes(&attributes);
  pthread_attr_destroy(&attributes);
  return bytes;
}

// False if none is left, or if the maker wants a larger stack than they have.
bool TakeFromReserve(pthread_t* thread, const pthread_attr_t* attributes, Body body,
                     void* argument) {
  Job job;
  job.body = body;
  job.argument = argument;
  if (attributes != nullptr) {
    const size_t stack = StackBytes(attributes);
    if (stack > kStackBytes && stack != DefaultStackBytes()) return false;
    int detached = PTHREAD_CREATE_JOINABLE;
    pthread_attr_getdetachstate(attributes, &detached);
    job.detached = detached == PTHREAD_CREATE_DETACHED;
  }
  sched_getaffinity(0, sizeof(job.cores), &job.cores);
  pthread_sigmask(SIG_SETMASK, nullptr, &job.signals);
  return Reserve::Get()->Take(job, thread);
}

}  // namespace

absl::Status ReserveThreads(int threads) {
  int error = 0;
  const int made = Reserve::Get()->Add(threads, &error);
  if (error == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the server needs ", threads + 1,
                                                   " threads, and there is room for ", made + 1,
                                                   ": ", WhyNoThread(error)));
}

#endif

int ReservedThreads() { return Reserve::Get()->size(); }

}  // namespace flashcore::server

#ifndef FLASHCORE_SANITIZER

extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
    void* argument) noexcept {
  if (flashcore::server::TakeFromReserve(thread, attributes, body, argument)) return 0;
  return flashcore::server::RealCreate(thread, attributes, body, argument);
}

#endif
