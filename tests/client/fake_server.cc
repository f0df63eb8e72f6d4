#include "tests/client/fake_server.h"

#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"

namespace flashcore {

class FakeServer::EchoService final : public v1::DebugService::Service {
  grpc::Status Echo(grpc::ServerContext*, const v1::EchoRequest* request,
                    v1::EchoResponse* response) override {
    response->set_payload(std::string(request->reply_bytes(), 'e'));
    return grpc::Status::OK;
  }
};

FakeServer::FakeServer(const std::string& address)
    : address_(address), echo_(std::make_unique<EchoService>()) {
  on_attend = [](grpc::ServerContext*, const v1::AttendRequest& request,
                 v1::AttendResponse* response) {
    AnswerRightly(request, response);
    return grpc::Status::OK;
  };
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(this);
  builder.RegisterService(echo_.get());
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

grpc::Status FakeServer::Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                                v1::AttendResponse* response) {
  {
    absl::MutexLock lock(&mutex_);
    ++attend_calls_;
    last_request_ = *request;
  }
  return on_attend(context, *request, response);
}

grpc::Status FakeServer::AttendStream(grpc::ServerContext*, Stream* stream) {
  return on_stream(stream);
}

grpc::Status FakeServer::GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                                       v1::GetServerInfoResponse* response) {
  response->set_version("fake");
  return grpc::Status::OK;
}

}  // namespace flashcore
