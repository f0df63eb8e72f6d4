// Drives a server: the engine of flashcore bench.
//
// Closed loop (rate 0): each of `concurrency` threads sends its next request when the last one is
// answered. Open loop: request i is due at start + i / rate; the first free thread sends it, and
// its latency counts from when it was due, so that a stalled server shows in the percentiles (no
// coordinated omission). Requests that were due but never sent are reported as not_sent.
//
// With echo, time is cut into slices of 250 ms that alternate between Attend and Echo, so both see
// the same machine; a request belongs to the slice in which it starts.
//
// Every reply is checked: its sizes by the client; that it differs from none of the earlier ones,
// at 16 places poisoned before each request, as the server promises equal bits for equal requests;
// and the first of each thread against the float64 reference on some rows. The checks are not
// timed.
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
#include "client/cpp/client.h"

namespace flashcore::cli {

struct LoadOptions {
  std::string target;
  AttendRequest shape;  // without memory
  int concurrency = 1;  // requests in flight at most
  int connections = 1;  // shared by the threads in turn
  absl::Duration duration = absl::Seconds(5);
  absl::Duration warmup = absl::Seconds(1);  // before it, not measured
  double rate = 0;                           // requests a second; 0: closed loop
  bool stream = false;                       // one AttendStream per connection
  bool echo = false;                         // closed loop only
  absl::Duration timeout = absl::Seconds(30);
  bool progress = false;  // a line on stderr
};

inline constexpr std::array<const char*, 5> kPhases = {"receive", "queue", "copy_in", "kernel",
                                                       "copy_out"};

// What was measured, of all threads together. Samples are microseconds, in no order.
struct LoadResult {
  std::vector<float> attend_us;
  std::vector<float> outside_kernel_us;  // latency - kernel time of the same request
  std::vector<float> echo_us;
  std::array<std::vector<float>, 5> phase_us;  // by kPhases
  std::map<std::string, uint64_t> errors;      // by status code, measured requests and echoes
  std::string first_error;
  uint64_t wrong_replies = 0;  // OK, but not what the checks expect
  uint64_t not_sent = 0;
  double attends_per_second = 0;
  size_t request_bytes = 0;  // of an Attend message
  size_t response_bytes = 0;

  uint64_t Failed() const;
};

// Blocks for warmup and duration. An error only if the load could not be started.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

// 2 multiply-adds per visible pair of rows, head and element: floating-point operations of a
// request.
double RequestFlops(const AttendRequest& shape);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_LOAD_H_
