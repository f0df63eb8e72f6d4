// A thread for the work of many clients.
#ifndef FLASHCORE_SERVER_SHARING_FAIR_JOBS_H_
#define FLASHCORE_SERVER_SHARING_FAIR_JOBS_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/sharing/turns.h"

namespace flashcore::server {

// Runs jobs, one at a time: those of a client in their order, and those of several in turns.
// Whoever adds jobs bounds how many wait. Thread-safe.
class FairJobs {
 public:
  using Job = absl::AnyInvocable<void()>;

  FairJobs() : thread_([this] { Run(); }) {}
  ~FairJobs();  // runs what it has
  FairJobs(const FairJobs&) = delete;
  FairJobs& operator=(const FairJobs&) = delete;

  void Add(absl::string_view client, Job job) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  Turns<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_SHARING_FAIR_JOBS_H_
