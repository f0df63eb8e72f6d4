// A server for the client's tests whose handlers the test sets.
#ifndef FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_
#define FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace flashcore {

// Listens on 127.0.0.1, or on `address`; handlers run on gRPC's threads, one call at a time each.
// Set them before the first call. Stops, cancelling what is in flight, when destroyed.
class FakeServer final : public v1::AttentionService::Service {
 public:
  template <typename Request, typename Response>
  using Handler = std::function<grpc::Status(grpc::ServerContext*, const Request&, Response*)>;
  using Stream = grpc::ServerReaderWriter<v1::AttendResponse, v1::AttendRequest>;
  using LoadReader = grpc::ServerReader<v1::LoadSequenceRequest>;
  using LeaseWriter = grpc::ServerWriter<v1::HoldLeaseResponse>;

  explicit FakeServer(const std::string& address = "127.0.0.1:0");
  ~FakeServer() override;

  std::string target() const;
  int attend_calls() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The last request that Attend received.
  v1::AttendRequest last_request() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The metadata `key` of each call so far, "" where there was none.
  std::vector<std::string> metadata(const std::string& key) const ABSL_LOCKS_EXCLUDED(mutex_);

  Handler<v1::AttendRequest, v1::AttendResponse> on_attend;  // default: AnswerRightly
  std::function<grpc::Status(Stream*)> on_stream;
  v1::GetServerInfoResponse info;  // what GetServerInfo answers; default: its version is "fake"

  // Unset: UNIMPLEMENTED.
  Handler<v1::CreateSequenceRequest, v1::CreateSequenceResponse> on_create;
  std::function<grpc::Status(LoadReader*, v1::LoadSequenceResponse*)> on_load;
  Handler<v1::ForkSequenceRequest, v1::ForkSequenceResponse> on_fork;
  Handler<v1::TruncateSequenceRequest, v1::TruncateSequenceResponse> on_truncate;
  Handler<v1::DeleteSequenceRequest, v1::DeleteSequenceResponse> on_delete;
  Handler<v1::GetSequenceRequest, v1::GetSequenceResponse> on_get;
  Handler<v1::ListSequencesRequest, v1::ListSequencesResponse> on_list;
  Handler<v1::ManageSequencesRequest, v1::ManageSequencesResponse> on_manage;
  // HoldLease, of which several may be open at a time.
  std::function<grpc::Status(grpc::ServerContext*, LeaseWriter*)> on_lease;

  // A reply of the right sizes: output is the bytes of the query, LSE counts 0, 1, 2, ...
  static void AnswerRightly(const v1::AttendRequest& request, v1::AttendResponse* response);

 private:
  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override;
  grpc::Status AttendStream(grpc::ServerContext* context, Stream* stream) override;
  grpc::Status LoadSequence(grpc::ServerContext* context, LoadReader* reader,
                            v1::LoadSequenceResponse* response) override;
  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;
  grpc::Status CreateSequence(grpc::ServerContext* context,
                              const v1::CreateSequenceRequest* request,
                              v1::CreateSequenceResponse* response) override;
  grpc::Status ForkSequence(grpc::ServerContext* context, const v1::ForkSequenceRequest* request,
                            v1::ForkSequenceResponse* response) override;
  grpc::Status TruncateSequence(grpc::ServerContext* context,
                                const v1::TruncateSequenceRequest* request,
                                v1::TruncateSequenceResponse* response) override;
  grpc::Status DeleteSequence(grpc::ServerContext* context,
                              const v1::DeleteSequenceRequest* request,
                              v1::DeleteSequenceResponse* response) override;
  grpc::Status GetSequence(grpc::ServerContext* context, const v1::GetSequenceRequest* request,
                           v1::GetSequenceResponse* response) override;
  grpc::Status ListSequences(grpc::ServerContext* context, const v1::ListSequencesRequest* request,
                             v1::ListSequencesResponse* response) override;
  grpc::Status ManageSequences(grpc::ServerContext* context,
                               const v1::ManageSequencesRequest* request,
                               v1::ManageSequencesResponse* response) override;
  grpc::Status HoldLease(grpc::ServerContext* context, const v1::HoldLeaseRequest* request,
                         LeaseWriter* writer) override;

  void NoteMetadata(const grpc::ServerContext& context) ABSL_LOCKS_EXCLUDED(mutex_);
  template <typename Request, typename Response>
  grpc::Status Handle(const Handler<Request, Response>& handler, grpc::ServerContext* context,
                      const Request& request, Response* response);

  mutable absl::Mutex mutex_;
  int attend_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::AttendRequest last_request_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::map<std::string, std::string>> metadata_ ABSL_GUARDED_BY(mutex_);  // of calls
  std::string address_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_FAKE_SERVER_H_
