// One thread of a load. Internal to load.cc.
#ifndef FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_
#define FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "client/cli/load.h"
#include "client/cli/random_request.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// What the threads share; set before they start.
struct LoadShared {
  const LoadOptions* options = nullptr;
  absl::Time start;                   // of the warmup
  absl::Time measure_start;           // of what counts
  absl::Time end;                     // no request starts later
  std::atomic<uint64_t> next_due{0};  // open loop: number of the next request
  std::atomic<uint64_t> finished{0};  // for the progress line
  std::atomic<uint64_t> failed{0};
};

// Used by the one thread that calls Run; its results are read after that.
class LoadWorker {
 public:
  // `stream` is null unless the load is to use streams. Pointers outlive the worker.
  LoadWorker(int index, LoadShared* shared, Client* client, AttendStream* stream);

  void Run();

  const LoadResult& result() const { return result_; }
  double attend_seconds() const { return attend_seconds_; }  // spent on measured Attends

 private:
  // One request, due at `due`; in a closed loop, now.
  void AttendOnce(absl::Time due);
  void EchoOnce();
  absl::Status Call(AttendResult* result);
  absl::Status CallStream(AttendResult* result);
  void Poison();
  bool ReplyIsRight();
  void Record(absl::Time due, absl::Time now, const AttendResult& result);
  void RecordError(const absl::Status& status, absl::Time due);
  bool NextDue(absl::Time* due);

  const int index_;
  LoadShared* const shared_;
  Client* const client_;
  AttendStream* const stream_;
  std::mt19937_64 random_;
  RandomRequest problem_;
  std::vector<size_t> probes_;      // indices into the output
  std::vector<uint16_t> expected_;  // at the probes; empty until the first reply
  std::vector<std::byte> echo_payload_, echo_reply_;
  uint64_t sent_ = 0;
  double attend_seconds_ = 0;
  LoadResult result_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_LOAD_WORKER_H_
