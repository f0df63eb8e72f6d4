// One AttendAsync with its retries. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_ASYNC_CALL_H_
#define FLASHCORE_CLIENT_CPP_ASYNC_CALL_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/codec.h"
#include "client/cpp/retry.h"
#include "grpcpp/alarm.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace flashcore {

inline constexpr char kAttendMethod[] = "/flashcore.v1.AttentionService/Attend";

// Keeps itself alive from Start until its callback has run. Thread-safe.
class AsyncCall : public std::enable_shared_from_this<AsyncCall> {
 public:
  struct Args {
    std::shared_ptr<grpc::Channel> channel;
    grpc::ByteBuffer message;  // what to send
    client::Destination destination;
    size_t num_spans = 0;
    bool safe_to_repeat = false;
    RetryPolicy retry;
    absl::Time deadline;
    std::function<void(absl::Status, AttendResult)> done;
  };

  explicit AsyncCall(Args args) : args_(std::move(args)) {}

  void Start() ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void OnAttemptDone(const grpc::Status& grpc_status) ABSL_LOCKS_EXCLUDED(mutex_);
  // True if another attempt was scheduled.
  bool Retry(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  Args args_;
  int attempts_ = 0;        // of the one attempt running: attempts follow each other
  grpc::ByteBuffer reply_;  // likewise
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);  // of the last attempt
  std::unique_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);            // of the wait before it
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_ASYNC_CALL_H_
