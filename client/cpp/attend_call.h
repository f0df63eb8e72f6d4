// One Attend with its retries, blocking or with a callback. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_
#define FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/codec.h"
#include "client/cpp/connection.h"
#include "grpcpp/alarm.h"
#include "grpcpp/client_context.h"

namespace flashcore {

inline constexpr char kAttendMethod[] = "/flashcore.v1.AttentionService/Attend";

namespace client {

// Client::Attend.
absl::Status CallAttend(const Connection& connection, const AttendRequest& request,
                        AttendResult* result, const CallOptions& call);

}  // namespace client

// An AttendAsync. Keeps itself alive from Start until its callback has run. Thread-safe.
class AttendCall : public std::enable_shared_from_this<AttendCall> {
 public:
  struct Args {
    std::shared_ptr<const client::Connection> connection;
    client::EncodedRequest request;
    bool safe_to_repeat = false;
    absl::Time deadline;
    std::string affinity;
    std::function<void(absl::Status, AttendResult)> done;
  };

  explicit AttendCall(Args args) : args_(std::move(args)) {}

  void Start() ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void OnAttemptDone(const grpc::Status& grpc_status) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(absl::Status status, AttendResult result);  // runs the callback
  // True if another attempt was scheduled.
  bool Retry(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  Args args_;
  // Only one attempt runs at a time; these two belong to it.
  int attempts_ = 0;  // so far, itself included
  grpc::ByteBuffer reply_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);  // of the last attempt
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);            // of the wait before it
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_ATTEND_CALL_H_
