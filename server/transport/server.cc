#include "server/transport/server.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"

namespace flashcore::server {
namespace {

// gRPC hands over an RPC only when its first message has arrived. If gRPC shuts down before that,
// it answers CANCELLED, which clients do not retry. So a drain keeps refusing RPCs with UNAVAILABLE
// until none has come for kQuiet, or for kRefuseAtMost if clients do not stop.
constexpr std::chrono::milliseconds kQuiet(300);
constexpr absl::Duration kRefuseAtMost = absl::Seconds(2);

// The end of a drain: requests that cannot finish are ended this long before the time is over, or
// at the latest when a quarter of the time is left. In that time launches that run end, clients
// read their last replies, those that do not are cut off, and gRPC shuts down.
constexpr absl::Duration kEndOfDrain = absl::Seconds(4);

// Time for RPCs of other services (health watches, reflection) to end after a drain.
constexpr std::chrono::milliseconds kShutdownGrace(100);

// "host:port" with the chosen port.
std::string WithPort(const std::string& address, int port) {
  if (absl::StartsWith(address, "unix:")) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace

std::vector<RpcMethod> Server::Methods(const Options& options) {
  std::vector<RpcMethod> methods = AttentionService::Methods();
  if (options.enable_echo) {
    for (RpcMethod& method : DebugService::Methods()) methods.push_back(std::move(method));
  }
  return methods;
}

Server::Server(const Options& options, Fleet* fleet, Metrics* metrics)
    : fleet_(fleet),
      context_{metrics, &fleet->clock(), Authenticator()},
      attention_({options.max_message_bytes, options.max_stream_inflight, options.shared_memory,
                  options.version},
                 fleet, &context_) {
  context_.unsent.Start(options.unsent_replies, context_.clock);
  if (options.enable_echo) {
    debug_ = std::make_unique<DebugService>(options.max_message_bytes, options.max_stream_inflight,
                                            &context_);
  }
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, Fleet* fleet,
                                                      Metrics* metrics) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto server = std::unique_ptr<Server>(new Server(options, fleet, metrics));
  if (absl::Status status = server->Listen(options); !status.ok()) return status;
  return server;
}

absl::Status Server::Listen(const Options& options) {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  // gRPC inflates a message completely before it checks the size, and the quota does not count it.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  // gRPC buffers a whole message before it checks the size, so the message limit does not bound
  // memory. The quota does: beyond it, gRPC cancels RPCs.
  grpc::ResourceQuota quota("flashcore");
  quota.Resize(options.transport_memory_bytes);
  builder.SetResourceQuota(quota);
  // With port reuse, two servers on one port would each get some of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  std::vector<int> ports(options.listen.size());
  for (size_t i = 0; i < options.listen.size(); ++i) {
    builder.AddListeningPort(options.listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(&attention_);
  if (debug_ != nullptr) builder.RegisterService(debug_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    std::vector<std::string> refused;
    for (size_t i = 0; i < ports.size(); ++i) {
      if (ports[i] == 0) refused.push_back(options.listen[i]);
    }
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", absl::StrJoin(refused.empty() ? options.listen : refused, ", "),
        ": the address is in use, not of this machine, or not permitted"));
  }
  for (size_t i = 0; i < ports.size(); ++i) {
    addresses_.push_back(WithPort(options.listen[i], ports[i]));
  }
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  health->SetServingStatus(v1::AttentionService::service_full_name(), true);
  health->SetServingStatus(true);
  context_.metrics->serving.Set(1);
  poll_workaround_ =
      std::make_unique<GrpcPollWorkaround>(server_.get(), "/grpc.health.v1.Health/Check");
  return absl::OkStatus();
}

bool Server::WaitForRpcs(absl::Time time) const {
  while (context_.admitted_rpcs.load() > 0) {
    if (absl::Now() >= time) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

bool Server::Drain(absl::Duration timeout) {
  server_->GetHealthCheckService()->SetServingStatus(false);
  context_.metrics->serving.Set(0);
  attention_.Drain();
  if (debug_ != nullptr) debug_->Drain();
  const absl::Time begin = absl::Now();
  const absl::Duration end = std::min(kEndOfDrain, timeout / 4);
  const absl::Time deadline = begin + timeout - end;
  if (!WaitForRpcs(deadline)) {
    const absl::Status status = absl::UnavailableError(
        "the server is draining, and the request could not finish within --drain_timeout_s");
    fleet_->EndAll(status);
    if (!WaitForRpcs(deadline + end / 2)) context_.unsent.CutOffAll();
    // What gRPC still holds then waits for connections that do not move; its shutdown closes them.
    WaitForRpcs(deadline + end * 3 / 4);
    return fleet_->load() == 0;
  }
  const auto quiet = [&] { return context_.last_event.load() + kQuiet <= context_.clock->Now(); };
  const absl::Time refuse_until = std::min(begin + kRefuseAtMost, deadline);
  while (!quiet() && absl::Now() < refuse_until) absl::SleepFor(absl::Milliseconds(2));
  return true;
}

Server::~Server() {
  if (server_ == nullptr) return;
  poll_workaround_.reset();  // it calls the server
  server_->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  server_->Wait();
}

}  // namespace flashcore::server
