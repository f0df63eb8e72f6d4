// What one worker of a load sends: one request after the other, and the checks of the answers.
#ifndef FLASHCORE_CLIENT_CLI_WORKLOAD_H_
#define FLASHCORE_CLIENT_CLI_WORKLOAD_H_

#include "absl/status/status.h"
#include "client/cpp/attend.h"

namespace flashcore::cli {

// Used by one thread at a time. The order of calls is Setup; then, for each request, Prepare, and
// after the request was sent Accept or OnError; at the end, whatever came before, Teardown. Only
// the time between Prepare and the answer is measured.
class Workload {
 public:
  virtual ~Workload() = default;

  // Makes what the requests need, here and on the server.
  virtual absl::Status Setup() = 0;

  // Makes request() the next one to send. After an error it may be called again.
  virtual absl::Status Prepare() = 0;

  // Valid after a Prepare that was OK, until the next.
  virtual AttendRequest& request() = 0;

  // Floating-point operations of request().
  virtual double RequestFlop() const = 0;

  // Whether the answer to request() is right. To be asked once: counts the request as done.
  virtual bool Accept(const AttendResult& result) = 0;

  // request() had no answer, or `status` for one.
  virtual void OnError(const absl::Status& status) = 0;

  // Deletes what Setup made on the server.
  virtual absl::Status Teardown() = 0;
};

// 2 multiply-adds per head, element and pair of rows that the mask lets see each other, of
// `query_rows` rows at the end of `kv_rows`. The mask is none or causal.
double AttentionFlop(const AttendRequest& shape, uint64_t query_rows, uint64_t kv_rows);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_WORKLOAD_H_
