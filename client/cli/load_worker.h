// One thread of a load. Internal to load.cc.
#ifndef FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_
#define FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/cli/load.h"
#include "client/cli/workload.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// What the threads share; set before they Run.
struct LoadShared {
  const LoadOptions* options = nullptr;
  const std::atomic<bool>* interrupted = nullptr;
  absl::Time start;                   // of the warmup
  absl::Time measure_start;           // of what counts
  absl::Time end;                     // no request starts later
  std::atomic<uint64_t> next_due{0};  // open loop: number of the next request
  std::atomic<uint64_t> finished{0};  // for the progress line
  std::atomic<uint64_t> failed{0};

  bool Over(absl::Time now) const { return now >= end || interrupted->load(); }
};

// Requests of one kind that a worker sends.
struct WorkerLoad {
  std::string kind;  // key of LoadResult::series
  std::unique_ptr<Workload> workload;
};

// Used by one thread at a time; its results are read after Run.
class LoadWorker {
 public:
  // The worker takes turns between `loads`, of which an open loop takes just the first; see load.h.
  // Pointers outlive the worker.
  LoadWorker(int index, LoadShared* shared, Client* client, std::vector<WorkerLoad> loads);

  absl::Status Setup();
  // Sends on `stream`, which outlives the Run; null: in calls of their own.
  void Run(AttendStream* stream);
  absl::Status Teardown();

  const LoadResult& result() const { return result_; }

 private:
  size_t Turns() const;  // kinds of requests, the same in unary calls, and Echo
  void RunOpenLoop();
  void RunClosedLoop();
  // False, and the error is counted, if there is nothing to send.
  bool Prepare(const WorkerLoad& load);
  // Sends what was prepared, on `stream` or, if that is null, in a unary call, and records it as of
  // `kind`; it was due at `due`.
  void Send(const WorkerLoad& load, const std::string& kind, AttendStream* stream, absl::Time due);
  absl::Status CallStream(AttendStream* stream, AttendRequest* request, AttendResult* result);
  void EchoOnce();
  void Record(Workload& workload, const std::string& kind, absl::Duration latency,
              const AttendResult& result);
  void RecordError(const absl::Status& status, absl::Time due);
  bool NextDue(absl::Time* due);

  const int index_;
  LoadShared* const shared_;
  Client* const client_;
  AttendStream* stream_ = nullptr;  // of the Run
  const std::vector<WorkerLoad> loads_;
  std::vector<std::byte> echo_payload_, echo_reply_;
  uint64_t sent_ = 0;
  LoadResult result_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_
