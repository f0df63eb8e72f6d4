// How calls are made to one server: deadlines and retries. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_CONNECTION_H_
#define FLASHCORE_CLIENT_CPP_CONNECTION_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/random/bit_gen_ref.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/cpp/lease.h"
#include "client/cpp/transport.h"
#include "client/local/process.h"
#include "flashcore/options.h"

namespace flashcore::client {

// Whether a call that ended with `status` reached no server, so that it had no effect.
bool NeverSent(const absl::Status& status);

// The wait before the next attempt, after `attempts` attempts of which the last ended at `now` with
// `status`. None if there is no next attempt: another status, too many attempts, sent and not safe
// to repeat, or the wait would end after the deadline.
std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random);

// Shared by a Client and the handles that may outlive it. Thread-safe. Whatever uses it
// calls CheckProcess first, before it takes a lock.
class Connection {
 public:
  // Does not connect: the first call does. INVALID_ARGUMENT if target or options make no sense.
  // FAILED_PRECONDITION over gRPC in a child of a process that has used it.
  static absl::StatusOr<std::shared_ptr<const Connection>> Create(absl::string_view target,
                                                                  ClientOptions options);
  ~Connection();

  // FAILED_PRECONDITION in a child that was forked from the process that made this.
  absl::Status CheckProcess() const;
  bool OfThisProcess() const { return process_.Here(); }

  const ClientOptions& options() const { return options_; }
  Transport& transport() const { return *transport_; }
  // Null without ClientOptions::lease.
  Lease* lease() const { return lease_.get(); }

  absl::Time Deadline(const CallOptions& call) const {
    return call.deadline.has_value() ? *call.deadline : absl::Now() + options_.timeout;
  }

  // NextBackoff with this client's policy.
  std::optional<absl::Duration> Backoff(const absl::Status& status, bool safe_to_repeat,
                                        int attempts, absl::Time deadline) const;

  // Calls `attempt`, which returns a status, until Backoff allows no other.
  template <typename Attempt>
  absl::Status WithRetries(bool safe_to_repeat, absl::Time deadline, int* attempts,
                           Attempt attempt) const {
    const absl::Time begin = absl::Now();
    transport_->AwaitConnection(deadline);
    for (*attempts = 1;; ++*attempts) {
      absl::Status status = attempt();
      const std::optional<absl::Duration> wait =
          Backoff(status, safe_to_repeat, *attempts, deadline);
      if (!wait.has_value()) return transport_->ExplainDeadline(std::move(status), begin);
      transport_->Pause(status, *wait);
    }
  }

  // A unary RPC with retries; see Transport::Call. `attempts`, unless null, is set to how many were
  // made.
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(const Request& request, bool safe_to_repeat,
                                const CallOptions& call, int* attempts = nullptr) const {
    if (absl::Status status = CheckProcess(); !status.ok()) return status;
    const CallOptions whole = {Deadline(call), call.affinity};  // of all attempts together
    Response response;
    int ignored = 0;
    absl::Status status =
        WithRetries(safe_to_repeat, *whole.deadline, attempts == nullptr ? &ignored : attempts,
                    [&] { return transport_->Call(request, whole, &response); });
    if (!status.ok()) return status;
    return response;
  }

 private:
  Connection(ClientOptions options, std::shared_ptr<Transport> transport);

  const local::Process process_;
  const ClientOptions options_;
  const std::shared_ptr<Transport> transport_;
  const std::unique_ptr<Lease> lease_;  // last: it uses the others
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_CONNECTION_H_
