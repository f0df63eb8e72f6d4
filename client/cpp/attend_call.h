// One Attend with its retries, blocking or with a callback. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_
#define FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "flashcore/attend.h"
#include "grpcpp/alarm.h"

namespace flashcore {

inline constexpr char kAttendMethod[] = "/flashcore.v1.AttentionService/Attend";

namespace client {

// Client::Attend.
absl::Status CallAttend(const Connection& connection, const AttendRequest& request,
                        AttendResult* result, const CallOptions& call);

// How the attempts of one asynchronous request travel. Start is called for one attempt after the
// other, Cancel from any thread.
class Attempts {
 public:
  using Done = std::function<void(absl::Status, AttendResult)>;

  virtual ~Attempts() = default;
  // `done` runs once, on a thread of the transport, or on this one if nothing could be sent.
  virtual void Start(Done done) = 0;
  // The attempt that runs, and any later one, ends with CANCELLED unless it has ended.
  virtual void Cancel() = 0;
  virtual size_t request_bytes() const = 0;  // of the message
};

// Takes a copy of `request`, except for tensors in shared memory, its output and its LSE.
absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(
    const std::shared_ptr<const Connection>& connection, const AttendRequest& request,
    absl::Time deadline, const std::string& affinity);
// The same, of a connection whose target is local.
absl::StatusOr<std::unique_ptr<Attempts>> MakeLocalAttempts(
    const std::shared_ptr<const Connection>& connection, const AttendRequest& request,
    absl::Time deadline);

}  // namespace client

// An AttendAsync. Keeps itself alive from Start until its callback has run. Thread-safe.
class AttendCall : public std::enable_shared_from_this<AttendCall> {
 public:
  struct Args {
    std::shared_ptr<const client::Connection> connection;
    std::unique_ptr<client::Attempts> attempts;
    bool safe_to_repeat = false;
    absl::Time deadline;
    client::Attempts::Done done;
  };

  explicit AttendCall(Args args) : args_(std::move(args)) {}

  void Start() ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void OnAttemptDone(absl::Status status, AttendResult result) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(absl::Status status, AttendResult result);  // runs the callback
  // True if another attempt was scheduled.
  bool Retry(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  Args args_;
  const absl::Time begin_ = absl::Now();
  int attempts_ = 0;  // so far, with the one that runs
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);  // of the wait before an attempt
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_
