// The threads of a load. Internal to load.cc.
#ifndef FLASHCORE_CLIENT_BENCH_LOAD_WORKER_H_
#define FLASHCORE_CLIENT_BENCH_LOAD_WORKER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/bench/load.h"
#include "client/bench/workload.h"
#include "flashcore/client.h"

namespace flashcore::cli {

inline constexpr std::chrono::milliseconds kTurn(50);

// State that the workers share. The times are set after the setup, before the workers run.
struct Shared {
  const LoadOptions& options;
  const std::atomic<bool>& interrupted;   // by a signal
  std::optional<Sequence> prefix = {};    // null: nothing is forked
  SteadyTime start = {};                  // of the warmup
  SteadyTime window_start = {};           // of what is measured
  SteadyTime end = {};                    // no request starts later
  uint64_t due_requests = 0;              // open loop: from start to end
  std::atomic<uint64_t> next_request{0};  // open loop
  absl::Mutex mutex = {};
  LoadResult result ABSL_GUARDED_BY(mutex) = {};

  uint64_t turn ABSL_GUARDED_BY(mutex) = 0;  // number of the current one, of all workers
  SteadyTime turn_end ABSL_GUARDED_BY(mutex) = {};

  SteadyTime Now() const { return options.clock.now(); }

  // The number of the turn at `now`. The first worker that comes when a turn is over begins the
  // next, so that no kind of request is left out, however long the others take.
  uint64_t TurnAt(SteadyTime now) {
    absl::MutexLock lock(&mutex);
    if (now >= turn_end) {
      ++turn;
      turn_end = now + kTurn;
    }
    return turn;
  }
};

// The RPCs of one connection that stay open while it is measured; null without --stream.
struct Streams {
  std::unique_ptr<AttendStream> attend;
  std::unique_ptr<AttendStream> compared;  // of LoadOptions::compare_target
};

// By kind: the time of its turns of all workers together, and how many workers have such turns.
using TurnTimes = std::map<std::string, std::pair<std::chrono::nanoseconds, int>>;

// One thread of a load. Used by one thread at a time.
class Worker {
 public:
  // `compared`: of LoadOptions::compare_target, or null.
  Worker(int index, Shared* shared, Client* client, Client* compared);

  // Calls `step` of every workload. The first error.
  absl::Status Each(absl::Status (Workload::*step)());

  // Sends on `streams`; where they are null, in unary calls.
  void Run(const Streams& streams);

  // After Run: the last turn lasts until `window_end`. Adds the time of the turns of each kind to
  // `times`.
  void AddTurnTimes(SteadyTime window_end, TurnTimes* times);

 private:
  struct Turn {
    const char* kind;
    Workload* workload;
    bool unary = false;               // even if there is a stream
    bool compared = false;            // over the other connection
    std::chrono::nanoseconds time{};  // of its turns so far, in the measured window
  };

  void AddTurn(const char* kind, std::unique_ptr<Workload> workload);
  // Ends the turn that began at turn_start_.
  void EndTurn(SteadyTime now);
  // False, and the error is counted, if there is nothing to send.
  bool Prepare(const Turn& turn);
  // When the next request is due, after a sleep until then. None if all were sent.
  std::optional<SteadyTime> NextDue();
  void Send(const Turn& turn, const Streams& streams, SteadyTime due);
  absl::Status SendOnStream(AttendStream* stream, AttendRequest* request, AttendResult* result);
  // Counts a request that took from `due` to `end`. False if it gives no sample.
  bool Record(Series* series, const Timing& timing, SteadyTime due, SteadyTime end);
  void RecordError(const absl::Status& status, SteadyTime due);

  const int index_;
  Shared* const shared_;
  Client* const client_;
  Client* const compared_;
  std::vector<std::unique_ptr<Workload>> workloads_;
  std::vector<Turn> turns_;  // an open loop has just one
  Turn* turn_ = nullptr;     // the current one, since turn_start_
  SteadyTime turn_start_ = {};
  AttendResult result_;  // of Send; kept for its memory
  uint64_t sent_on_stream_ = 0;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_LOAD_WORKER_H_
