// A server of raw messages for the client's tests: answers as told.
#ifndef FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_
#define FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "flashcore/v1/debug.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace flashcore {

// Listens on 127.0.0.1, or on `address`; handlers run on gRPC's threads, one call at a time each.
// Set them before the first call. Stops, cancelling what is in flight, when destroyed.
class FakeServer final : public v1::AttentionService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::AttendResponse, v1::AttendRequest>;

  explicit FakeServer(const std::string& address = "127.0.0.1:0");
  ~FakeServer() override;

  std::string target() const;
  int attend_calls() const ABSL_LOCKS_EXCLUDED(mutex_);
  // What Attend last received.
  v1::AttendRequest last_request() const ABSL_LOCKS_EXCLUDED(mutex_);

  std::function<grpc::Status(grpc::ServerContext*, const v1::AttendRequest&, v1::AttendResponse*)>
      on_attend;  // default: AnswerRightly
  std::function<grpc::Status(Stream*)> on_stream;

  // A reply of the right sizes: output is the bytes of the query, LSE counts 0, 1, 2, ...
  static void AnswerRightly(const v1::AttendRequest& request, v1::AttendResponse* response);

 private:
  class EchoService;

  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override;
  grpc::Status AttendStream(grpc::ServerContext* context, Stream* stream) override;
  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;

  mutable absl::Mutex mutex_;
  int attend_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::AttendRequest last_request_ ABSL_GUARDED_BY(mutex_);
  std::string address_;
  int port_ = 0;
  std::unique_ptr<v1::DebugService::Service> echo_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_
