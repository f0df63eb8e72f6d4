// Drives a server: the engine of flashcore bench.
//
// Closed loop (rate 0): each of `concurrency` threads sends its next request when the last one is
// answered. Open loop: request i is due at start + i / rate; the first free thread sends it, and
// its latency counts from when it was due, so that a stalled server shows in the percentiles (no
// coordinated omission). Requests that were due but never sent are reported as not_sent.
//
// With echo, compare_inline or compare_unary, time is cut into slices of 50 ms that take turns
// between the requests, the same with K/V inline, the same in unary calls, and Echo, so that all
// see the same machine; a request belongs to the slice in which it starts.
//
// Every reply is checked: its sizes by the client; that it differs from none of the earlier ones to
// the same request, at 16 places poisoned before each request, as the server promises equal bits
// for equal requests; and the first of each thread against the float64 reference on some rows. The
// checks are not timed, nor is what a workload does between requests.
#ifndef FLASHCORE_CLIENT_CLI_LOAD_H_
#define FLASHCORE_CLIENT_CLI_LOAD_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/flag_types.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// Of a load over resident sequences. Rows.
struct ResidentOptions {
  int64_t sequences = 1;  // shared out among the threads
  uint32_t context = 512;
  uint32_t fork_from_prefix = 0;  // the first rows of each, loaded once and forked; 0: none
  uint32_t prefill_rows = 256;    // of one prefill request
  bool pin = false;
  bool compare_inline = false;  // decode only
};

struct LoadOptions {
  std::string target;
  ClientOptions client;
  BenchMode mode = BenchMode::kAttend;
  AttendRequest shape;       // without memory; spans are those of an inline request
  ResidentOptions resident;  // unless the mode is attend
  int concurrency = 1;       // requests in flight at most
  int connections = 1;       // shared by the threads in turn
  absl::Duration duration = absl::Seconds(5);
  absl::Duration warmup = absl::Seconds(1);  // before it, not measured
  double rate = 0;                           // requests a second; 0: closed loop
  bool stream = false;                       // one AttendStream per connection
  bool shared_memory = false;                // tensors do not travel
  bool compare_unary = false;                // with stream; closed loop only
  bool echo = false;                         // closed loop only
  bool progress = false;                     // a line on stderr
};

inline constexpr std::array<const char*, 5> kPhases = {"receive", "queue", "copy_in", "kernel",
                                                       "copy_out"};

// Requests of one kind that succeeded, of one thread or of all. Samples are microseconds, in no
// order.
struct Series {
  std::vector<float> latency_us;
  std::vector<float> outside_kernel_us;        // latency - kernel time of the same request
  std::array<std::vector<float>, 5> phase_us;  // by kPhases
  double flop = 0;
  uint64_t query_rows = 0;
  uint64_t request_bytes = 0;  // of all messages together
  uint64_t response_bytes = 0;
  double per_second = 0;  // requests

  // Of one request on average; NaN without any.
  double PerRequest(double sum) const { return sum / static_cast<double>(latency_us.size()); }
};

// What was measured, of all threads together.
struct LoadResult {
  std::map<std::string, Series> series;  // by kind: attend, decode, prefill, inline, unary
  std::vector<float> echo_us;
  std::map<std::string, uint64_t> errors;  // by status code, of measured requests and echoes
  std::string first_error;
  uint64_t wrong_replies = 0;  // OK, but not what the checks expect
  uint64_t not_sent = 0;
  bool interrupted = false;  // by SIGINT or SIGTERM, before the end

  uint64_t Ok() const;  // requests of all series
  uint64_t Failed() const;
};

// Blocks for preparation, warmup and duration, and until the sequences are deleted again. SIGINT
// and SIGTERM end the load early; a second one kills the process. An error only if the load could
// not be started.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_LOAD_H_
