// One Attend with its retries, blocking or with a callback. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_
#define FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/connection.h"
#include "client/cpp/transport.h"
#include "flashcore/attend.h"
#include "grpcpp/alarm.h"

namespace flashcore {

namespace client {

// Client::Attend.
absl::Status CallAttend(const Connection& connection, const AttendRequest& request,
                        AttendResult* result, const CallOptions& call);

// Those of Client::AttendAsync; see Transport. `call` has its deadline.
absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(const Connection& connection,
                                                       const AttendRequest& request,
                                                       const CallOptions& call);

// That of Client::AttendOnCudaStream.
absl::StatusOr<std::unique_ptr<Attempts>> MakeCudaStreamAttempt(const Connection& connection,
                                                                const AttendRequest& request,
                                                                void* stream,
                                                                const CallOptions& call);

}  // namespace client

// An AttendAsync or AttendOnCudaStream. Keeps itself alive from Start until its callback has run.
// Thread-safe.
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
