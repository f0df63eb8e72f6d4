#include "tests/client/fake_server.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace flashcore {

FakeServer::FakeServer(const std::string& address) : address_(address) {
  on_attend = [](grpc::ServerContext*, const v1::AttendRequest& request,
                 v1::AttendResponse* response) {
    AnswerRightly(request, response);
    return grpc::Status::OK;
  };
  info.set_version("fake");
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port_);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

FakeServer::~FakeServer() {
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

std::string FakeServer::target() const {
  return address_.rfind("unix:", 0) == 0 ? address_ : absl::StrCat("127.0.0.1:", port_);
}

int FakeServer::attend_calls() const {
  absl::MutexLock lock(&mutex_);
  return attend_calls_;
}

v1::AttendRequest FakeServer::last_request() const {
  absl::MutexLock lock(&mutex_);
  return last_request_;
}

std::vector<std::string> FakeServer::metadata(const std::string& key) const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> values;
  for (const auto& of_call : metadata_) {
    const auto it = of_call.find(key);
    values.push_back(it == of_call.end() ? "" : it->second);
  }
  return values;
}

void FakeServer::AnswerRightly(const v1::AttendRequest& request, v1::AttendResponse* response) {
  response->set_request_id(request.request_id());
  response->set_output(request.query());
  response->mutable_timing()->set_kernel_ns(1000);
  if (!request.return_lse()) return;
  uint64_t elements = 0;
  for (const v1::Span& span : request.spans()) elements += span.query_rows() * request.num_heads();
  std::vector<float> lse(elements);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = static_cast<float>(i);
  response->set_lse(lse.data(), lse.size() * sizeof(float));
}

void FakeServer::NoteMetadata(const grpc::ServerContext& context) {
  absl::MutexLock lock(&mutex_);
  auto& of_call = metadata_.emplace_back();
  for (const auto& [key, value] : context.client_metadata()) {
    of_call.emplace(std::string(key.data(), key.size()), std::string(value.data(), value.size()));
  }
}

template <typename Request, typename Response>
grpc::Status FakeServer::Handle(const Handler<Request, Response>& handler,
                                grpc::ServerContext* context, const Request& request,
                                Response* response) {
  NoteMetadata(*context);
  if (handler == nullptr) return {grpc::StatusCode::UNIMPLEMENTED, "no handler"};
  return handler(context, request, response);
}

grpc::Status FakeServer::Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                                v1::AttendResponse* response) {
  {
    absl::MutexLock lock(&mutex_);
    ++attend_calls_;
    last_request_ = *request;
  }
  return Handle(on_attend, context, *request, response);
}

grpc::Status FakeServer::AttendStream(grpc::ServerContext* context, Stream* stream) {
  NoteMetadata(*context);
  return on_stream(stream);
}

grpc::Status FakeServer::LoadSequence(grpc::ServerContext* context, LoadReader* reader,
                                      v1::LoadSequenceResponse* response) {
  NoteMetadata(*context);
  if (on_load == nullptr) return {grpc::StatusCode::UNIMPLEMENTED, "no handler"};
  return on_load(reader, response);
}

grpc::Status FakeServer::GetServerInfo(grpc::ServerContext* context,
                                       const v1::GetServerInfoRequest*,
                                       v1::GetServerInfoResponse* response) {
  NoteMetadata(*context);
  *response = info;
  return grpc::Status::OK;
}

grpc::Status FakeServer::CreateSequence(grpc::ServerContext* context,
                                        const v1::CreateSequenceRequest* request,
                                        v1::CreateSequenceResponse* response) {
  return Handle(on_create, context, *request, response);
}

grpc::Status FakeServer::ForkSequence(grpc::ServerContext* context,
                                      const v1::ForkSequenceRequest* request,
                                      v1::ForkSequenceResponse* response) {
  return Handle(on_fork, context, *request, response);
}

grpc::Status FakeServer::TruncateSequence(grpc::ServerContext* context,
                                          const v1::TruncateSequenceRequest* request,
                                          v1::TruncateSequenceResponse* response) {
  return Handle(on_truncate, context, *request, response);
}

grpc::Status FakeServer::DeleteSequence(grpc::ServerContext* context,
                                        const v1::DeleteSequenceRequest* request,
                                        v1::DeleteSequenceResponse* response) {
  return Handle(on_delete, context, *request, response);
}

grpc::Status FakeServer::GetSequence(grpc::ServerContext* context,
                                     const v1::GetSequenceRequest* request,
                                     v1::GetSequenceResponse* response) {
  return Handle(on_get, context, *request, response);
}

grpc::Status FakeServer::ListSequences(grpc::ServerContext* context,
                                       const v1::ListSequencesRequest* request,
                                       v1::ListSequencesResponse* response) {
  return Handle(on_list, context, *request, response);
}

grpc::Status FakeServer::ManageSequences(grpc::ServerContext* context,
                                         const v1::ManageSequencesRequest* request,
                                         v1::ManageSequencesResponse* response) {
  return Handle(on_manage, context, *request, response);
}

grpc::Status FakeServer::HoldLease(grpc::ServerContext* context, const v1::HoldLeaseRequest*,
                                   LeaseWriter* writer) {
  NoteMetadata(*context);
  if (on_lease == nullptr) return {grpc::StatusCode::UNIMPLEMENTED, "no handler"};
  return on_lease(context, writer);
}

}  // namespace flashcore
