// Drives a server: the engine of flashcore bench.
//
// Closed loop (rate 0): each of `concurrency` threads sends its next request when the last one has
// been answered. Open loop: request i is due at start + i / rate. The first free thread sends it,
// and its latency counts from when it was due, so that a stalled server shows in the percentiles
// (no coordinated omission).
//
// With compare_inline, compare_unary or compare_target, the kinds of requests take turns of at
// least 50 ms, the same for all threads: the request itself, the same with K/V inline, the same as
// a unary call, and the same to another address. A request belongs to the turn in which it starts,
// and a thread's turn lasts until its last request has been answered and checked.
//
// Times, on a monotonic clock:
//   measured window      from the end of the warmup to the end of the load, or its interruption
//   turn time of a kind  wall time of its turns in the window: all of the window if it is alone.
//                        The mean over the threads that send it
//   requests per second  requests of a kind that ended in the window / its turn time
//   samples, errors      of requests that started (open loop: were due) in the window
//
// Every reply is checked: its sizes by the client; 16 elements of its output against the first
// reply to the same request; and the first reply of each thread against the float64 reference, on
// some rows. Latencies leave out the checks and what a workload does between requests.
#ifndef FLASHCORE_CLIENT_BENCH_LOAD_H_
#define FLASHCORE_CLIENT_BENCH_LOAD_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/flag_types.h"
#include "flashcore/client.h"

namespace flashcore::cli {

using SteadyTime = std::chrono::steady_clock::time_point;

// The clock of a load, for tests to replace. Its functions are thread-safe.
struct LoadClock {
  std::function<SteadyTime()> now = &std::chrono::steady_clock::now;
  std::function<void(SteadyTime)> sleep_until = [](SteadyTime time) {
    std::this_thread::sleep_until(time);
  };
};

// Options of a load on resident sequences.
struct ResidentOptions {
  int64_t sequences = 1;          // shared out among the threads
  uint32_t context = 512;         // rows
  uint32_t fork_from_prefix = 0;  // first rows of each, loaded once and forked; 0: none
  uint32_t prefill_rows = 256;    // of one prefill request
  KvDType kv_dtype = KvDType::kSameAsQuery;
  bool pin = false;
  absl::Duration idle_timeout;  // 0: the server's
  bool compare_inline = false;  // decode only
};

struct LoadOptions {
  std::vector<std::string> targets;  // servers: connection i goes to number i modulo their number
  ClientOptions client;
  BenchMode mode = BenchMode::kAttend;
  AttendRequest shape;       // without memory; the spans are those of an inline request
  ResidentOptions resident;  // unless the mode is attend
  int concurrency = 1;       // threads, and so requests in flight at most
  int connections = 1;       // shared by the threads
  absl::Duration duration = absl::Seconds(5);
  absl::Duration warmup = absl::Seconds(1);  // before `duration`, not measured
  double rate = 0;                           // requests a second; 0: closed loop
  bool stream = false;                       // one AttendStream per connection
  bool shared_memory = false;                // tensors are in memory shared with the server
  std::string compare_target;                // gRPC, for turns of the kind grpc; empty: none
  bool compare_unary = false;                // with stream; closed loop only
  LoadClock clock;
};

// Phases of a request on the server, in order.
inline constexpr std::array<const char*, 6> kPhases = {"receive", "staging_wait", "queue",
                                                       "copy_in", "kernel",       "copy_out"};
inline constexpr size_t kKernelPhase = 4;

struct Sample {
  float latency_us = 0;
  std::array<float, kPhases.size()> phase_us = {};
};

// Requests of one kind that succeeded. The sums are over the samples.
struct Series {
  std::deque<Sample> samples;  // in no order
  uint64_t ended = 0;          // in the measured window
  double turn_seconds = 0;     // see above
  double flop = 0;
  uint64_t query_rows = 0;
  uint64_t request_bytes = 0;  // of the messages
  uint64_t response_bytes = 0;
};

struct LoadResult {
  std::string server;                      // of the first connection: its version and devices
  double window_seconds = 0;               // wall time of the measured window
  std::map<std::string, Series> series;    // by kind: attend, decode, prefill, inline, unary, grpc
  std::map<std::string, uint64_t> errors;  // by status code
  std::string first_error;
  uint64_t wrong_replies = 0;  // OK, but not what the checks expect; in the warmup, too
  uint64_t not_sent = 0;       // open loop: due in the window, but no thread was free
  bool interrupted = false;    // by SIGINT or SIGTERM

  uint64_t Ok() const;  // samples of all series
  uint64_t Failed() const;
};

// Rows by which a decoding sequence grows before it is truncated to its context.
inline constexpr uint32_t kDecodeGrowth = 64;

// Whether worker `index` of `workers` prefills: in a mixed load every fourth, at least one.
bool Prefills(BenchMode mode, int index, int workers);

// Sequences of worker `index`: equal shares, and one more for the first ones if some are left.
int ShareOf(int64_t sequences, int index, int workers);

// 2 multiply-adds per head, element and visible pair of rows, of `query_rows` rows at the end of
// `kv_rows`. The mask is none or causal.
double AttentionFlop(const AttendRequest& shape, uint64_t query_rows, uint64_t kv_rows);

// Blocks for the setup, warmup and duration, and until the sequences are deleted. The first SIGINT
// or SIGTERM ends the load early, a second one the process. An error only if the load could not be
// started.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

// The same in rounds over the same connections and sequences: after the setup, each time `next`
// returns true, a warmup and duration, whose result goes to `done`.
absl::Status RunRounds(const LoadOptions& options, const std::function<bool()>& next,
                       const std::function<void(const LoadResult&)>& done);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_LOAD_H_
