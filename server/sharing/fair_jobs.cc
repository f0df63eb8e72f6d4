#include "server/sharing/fair_jobs.h"

#include <utility>

namespace flashcore::server {

FairJobs::~FairJobs() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void FairJobs::Add(absl::string_view client, Job job) {
  MutexLock lock(&mutex_);
  jobs_.Add(client, std::move(job));
  changed_.NotifyAll();
}

void FairJobs::Run() {
  while (true) {
    Job job;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && jobs_.empty()) changed_.Wait(&mutex_);
      if (jobs_.empty()) return;
      job = jobs_.Take();
    }
    job();
  }
}

}  // namespace flashcore::server
