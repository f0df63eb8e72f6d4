#include "server/transport/server.h"

#include <grpc/grpc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/server_posix.h"
#include "proto/wire/frames.h"
#include "proto/wire/host_port.h"
#include "server/base/error_info.h"
#include "server/base/socket.h"
#include "server/transport/grpc/adapters.h"

namespace flashcore::server {
namespace {

// gRPC hands over an RPC only when its first message has arrived. So a drain keeps refusing RPCs
// with UNAVAILABLE until none has come for kQuiet, or for kRefuseAtMost if clients do not stop.
// Calls on their way then end with their connection, which clients see as UNAVAILABLE, too.
constexpr std::chrono::milliseconds kQuiet(300);
constexpr std::chrono::seconds kRefuseAtMost(2);

// The end of a drain: requests that cannot finish are ended this long before the time is over, or
// at the latest when a quarter of the time is left. In that time launches that run end, clients
// read their last replies, those that do not are cut off, and gRPC shuts down.
constexpr Nanoseconds kEndOfDrain = std::chrono::seconds(4);

// Time for RPCs of other services (health watches, reflection) to end after a drain.
constexpr std::chrono::milliseconds kShutdownGrace(100);

// A connection that was silent for the interval is pinged, and closed if no answer comes in time.
constexpr absl::Duration kKeepaliveInterval = absl::Seconds(60);
constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(20);

// Clients that ping more often while nothing is sent are disconnected.
constexpr absl::Duration kMinPingInterval = absl::Seconds(10);

// A connection without an RPC for this long is closed; its client reconnects with the next RPC.
constexpr absl::Duration kMaxIdle = absl::Minutes(30);

// Time for streams to end on a connection of the greatest age.
constexpr absl::Duration kMaxAgeGrace = absl::Seconds(30);

constexpr int kOtherFiles = 256;  // open ones that are not connections, at most

constexpr int kMaxMetadataBytes = 16 << 10;  // of one RPC

// "host:port" with the chosen port.
std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

Authenticator::Options AuthenticatorOptions(const Server::Options& options) {
  Authenticator::Options authenticator = options.authenticator;
  authenticator.client_certificates = !options.credentials.tls.client_ca_file.empty();
  authenticator.needs_tokens = !options.credentials.token_file.empty();
  return authenticator;
}

AttentionMethods::Options MethodsOptions(const Server::Options& options) {
  AttentionMethods::Options methods;
  methods.max_message_bytes = options.max_message_bytes;
  methods.max_stream_inflight = options.max_stream_inflight;
  methods.shared_memory = options.shared_memory;
  methods.device_memory = options.device_memory;
  methods.version = options.version;
  methods.max_connections = options.connections.max;
  methods.max_connections_per_host = options.connections.max_per_host;
  methods.max_connections_per_client = options.connections.max_per_client;
  methods.max_connection_streams = options.connections.max_streams;
  if (!options.local_listen.empty()) methods.max_connection_rings = local::Connection::kMaxRings;
  return methods;
}

// The path of "unix:path" or "unix:///path"; empty for a TCP address.
std::string UnixPath(absl::string_view address) {
  if (!absl::ConsumePrefix(&address, "unix:")) return "";
  absl::ConsumePrefix(&address, "//");
  return std::string(address);
}

Shares::Limits DoorLimits(const Server::Options& options) {
  const auto is_unix = [](const std::string& address) { return !UnixPath(address).empty(); };
  const std::vector<std::string>& listen = options.listen;
  const int doors = (std::all_of(listen.begin(), listen.end(), is_unix) ? 0 : 1) +
                    (std::any_of(listen.begin(), listen.end(), is_unix) ? 1 : 0) +
                    (options.local_listen.empty() ? 0 : 1);
  const int all = std::max(options.connections.max / std::max(doors, 1), 1);
  return {static_cast<size_t>(all),
          static_cast<size_t>(std::min(options.connections.max_per_host, all))};
}

absl::StatusOr<std::vector<FileDescriptor>> ListenOn(const std::string& address,
                                                     const UnixSocketAccess& unix_sockets) {
  std::vector<FileDescriptor> sockets;
  if (const std::string path = UnixPath(address); !path.empty()) {
    absl::StatusOr<FileDescriptor> socket = ListenUnix(path, unix_sockets);
    if (!socket.ok()) return socket.status();
    sockets.push_back(*std::move(socket));
    return sockets;
  }
  const std::optional<HostPort> parsed = ParseHostPort(address);
  if (!parsed.has_value()) return absl::InvalidArgumentError("it is not host:port or unix:path");
  const std::string host(parsed->host);
  if (host == "0.0.0.0") {  // IPv6 too, where the machine has it
    if (auto both = ListenTcp("::", parsed->port); both.ok()) return both;
  }
  return ListenTcp(host, parsed->port);
}

// Bounds what one connection may hold, and ends dead ones.
void LimitConnections(const Server::Connections& limits, grpc::ServerBuilder* builder) {
  const auto set = [&](const char* argument, absl::Duration time) {
    if (time == absl::InfiniteDuration()) return;
    builder->AddChannelArgument(argument, static_cast<int>(absl::ToInt64Milliseconds(time)));
  };
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.max_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  set(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, limits.handshake_timeout);
  set(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveInterval);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeout);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // keepalive needs them
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingInterval);
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxIdle);
  set(GRPC_ARG_MAX_CONNECTION_AGE_MS, limits.max_age);
  set(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kMaxAgeGrace);
}

// The services that reflection lists.
std::vector<std::string> ServiceNames() {
  return {v1::AttentionService::service_full_name(),
          grpc::reflection::v1::ServerReflection::service_full_name(),
          grpc::reflection::v1alpha::ServerReflection::service_full_name(),
          "grpc.health.v1.Health"};
}

std::function<void(const std::string& address)> WhenDead(const Server::Options& options) {
  return [on_dead = options.on_dead](const std::string& address) {
    if (on_dead) on_dead(address, absl::UnavailableError("the socket does not accept any more"));
  };
}

}  // namespace

std::vector<RpcMethod> Server::Methods(const Options& options) {
  std::vector<RpcMethod> methods = AttentionService::Methods();
  if (!options.local_listen.empty()) {
    for (RpcMethod method : AttentionService::Methods()) {
      if (method.type == "bidi_stream") continue;  // rings take its place
      method.transport = "local";
      methods.push_back(std::move(method));
    }
  }
  return methods;
}

Server::Server(const Options& options, Fleet* fleet, Metrics* metrics)
    : fleet_(fleet),
      on_health_(options.on_health),
      client_connections_(options.connections.max_per_client),
      context_{metrics, &fleet->clock(), Authenticator(AuthenticatorOptions(options), metrics),
               &client_connections_, MakeGrpcAlarm},
      methods_(MethodsOptions(options), fleet, &context_),
      attention_(&methods_),
      reflection_(ServiceNames(), &context_) {
  std::vector<StagingPool*> pools;
  for (const auto& engine : fleet->engines()) pools.push_back(&engine->staging());
  context_.unsent.Start(options.unsent_replies, context_.clock, std::move(pools));
  context_.max_message_bytes = options.max_message_bytes;
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options, Fleet* fleet,
                                                      Metrics* metrics) {
  grpc::EnableDefaultHealthCheckService(true);
  auto server = std::unique_ptr<Server>(new Server(options, fleet, metrics));
  if (absl::Status status = server->ReadCredentials(options); !status.ok()) return status;
  if (absl::Status status = server->ListenLocally(options); !status.ok()) return status;
  if (absl::Status status = server->Listen(options); !status.ok()) return status;
  if (server->local_ != nullptr) {
    server->addresses_.push_back(absl::StrCat("local:", options.local_listen));
  }
  return server;
}

absl::Status Server::ReadCredentials(const Options& options) {
  const auto on_tokens = [this](TokenTable tokens) {
    context_.authenticator.SetTokens(std::move(tokens));
    attention_.EndRevoked();
  };
  auto files =
      CredentialFiles::Start(options.credentials, context_.metrics, context_.clock, on_tokens);
  if (!files.ok()) return files.status();
  credentials_ = *std::move(files);
  return absl::OkStatus();
}

absl::Status Server::Listen(const Options& options) {
  grpc::ServerBuilder builder;
  // The services check --max_message_bytes themselves (CheckMessageBytes), so that the error says
  // what is allowed, and one large message does not end a stream. Fields that protobuf can parse
  // come through.
  builder.SetMaxReceiveMessageSize(std::numeric_limits<int32_t>::max());
  builder.SetMaxSendMessageSize(-1);
  // gRPC inflates a message completely before it checks the size, and the quota does not count it.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  // gRPC buffers a whole message before anybody checks the size, so the message limit does not
  // bound memory. The quota does: beyond it, gRPC cancels RPCs.
  grpc::ResourceQuota quota("flashcore");
  quota.Resize(options.transport_memory_bytes);
  builder.SetResourceQuota(quota);
  LimitConnections(options.connections, &builder);
  std::vector<AcceptLoop::Listener> listeners;
  for (const std::string& address : options.listen) {
    absl::Status status = OpenSockets(address, options.unix_sockets, &builder, &listeners);
    if (!status.ok()) return status;
  }
  builder.RegisterService(&attention_);
  if (options.enable_reflection) {
    for (grpc::Service* service : reflection_.services()) builder.RegisterService(service);
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC does not start");
  server_->GetHealthCheckService()->SetServingStatus(v1::AttentionService::service_full_name(),
                                                     true);
  SetServing(true);
  AcceptLoop::Options accept = options.connections.accept;
  accept.connections = DoorLimits(options);
  accept.first_descriptor = options.connections.max + kOtherFiles;
  accept.is_proxy = [this](const Peer& peer) { return context_.authenticator.TrustsPeer(peer); };
  accept.on_dead = WhenDead(options);
  accept_loop_ = std::make_unique<AcceptLoop>(accept, std::move(listeners), &client_connections_,
                                              &passed_files_, context_.metrics, context_.clock);
  SelfCheck::Options self_check = options.self_check;
  self_check.on_dead = [on_dead = options.on_dead](const absl::Status& why) {
    if (on_dead) on_dead("in process", why);
  };
  self_check_ = std::make_unique<SelfCheck>(std::move(self_check), server_.get());
  return absl::OkStatus();
}

absl::Status Server::ListenLocally(const Options& options) {
  if (options.local_listen.empty()) return absl::OkStatus();
  local::Server::Options local_options;
  local_options.path = options.local_listen;
  local_options.access = options.unix_sockets;
  local_options.connections = DoorLimits(options);
  local_options.connection.max_calls = options.connections.max_streams;
  local_options.connection.hello_within = options.connections.accept.first_bytes_within;
  // Any client can send a few of the largest frames at once.
  local_options.received_bytes.one =
      std::max(options.transport_memory_bytes / 4, 4 * size_t{wire::kMaxFrameBytes});
  local_options.received_bytes.all = 4 * local_options.received_bytes.one;
  local_options.call_bytes = {options.transport_memory_bytes, options.transport_memory_bytes / 4};
  local_options.on_dead = WhenDead(options);
  auto server = local::Server::Start(local_options, &methods_, &passed_files_);
  if (!server.ok()) return server.status();
  local_ = *std::move(server);
  return absl::OkStatus();
}

absl::Status Server::OpenSockets(const std::string& address, const UnixSocketAccess& unix_sockets,
                                 grpc::ServerBuilder* builder,
                                 std::vector<AcceptLoop::Listener>* listeners) {
  absl::StatusOr<std::vector<FileDescriptor>> sockets = ListenOn(address, unix_sockets);
  if (!sockets.ok()) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": ", sockets.status().message()));
  }
  const bool is_unix = !UnixPath(address).empty();
  addresses_.push_back(is_unix ? address
                               : WithPort(address, PortOf(LocalAddress(sockets->front().get()))));
  const bool tls = !is_unix && credentials_->certificates() != nullptr;
  const AcceptLoop::Serve serve = tls ? ServeTls(builder) : ServePlaintext();
  for (FileDescriptor& socket : *sockets) {
    listeners->push_back({addresses_.back(), tls, std::move(socket), serve});
  }
  return absl::OkStatus();
}

AcceptLoop::Serve Server::ServePlaintext() {
  return [this](FileDescriptor connection) {
    grpc::AddInsecureChannelFromFd(server_.get(), connection.release());
  };
}

AcceptLoop::Serve Server::ServeTls(grpc::ServerBuilder* builder) {
  tls_.push_back(MakeTlsCredentials(credentials_->certificates()));
  acceptors_.push_back(builder->experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, tls_.back()));
  return [acceptor = acceptors_.back().get()](FileDescriptor connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = connection.release();
    acceptor->HandleNewConnection(&parameters);
  };
}

void Server::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
  context_.metrics->serving.Set(serving ? 1 : 0);
  if (on_health_) on_health_(serving);
}

bool Server::WaitForRpcs(TimePoint time) const {
  while (context_.admitted_rpcs.load() > 0) {
    if (context_.clock->Now() >= time) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

bool Server::Drain(absl::Duration timeout) {
  const TimePoint begin = context_.clock->Now();
  SetServing(false);
  attention_.Drain();
  const Nanoseconds end = std::min(kEndOfDrain, absl::ToChronoNanoseconds(timeout) / 4);
  const TimePoint deadline = begin + absl::ToChronoNanoseconds(timeout) - end;
  if (!WaitForRpcs(deadline)) {
    const absl::Status status = absl::UnavailableError(
        absl::StrCat(kDrains, ", and the request could not finish within --drain_timeout_s"));
    fleet_->EndAll(status);
    if (!WaitForRpcs(deadline + end / 2)) context_.unsent.CutOffAll();
    // Calls that gRPC still holds then wait for connections that do not move; its shutdown closes
    // them.
    WaitForRpcs(deadline + end * 3 / 4);
    return fleet_->load() == 0;
  }
  const auto quiet = [&] { return context_.last_event.load() + kQuiet <= context_.clock->Now(); };
  const TimePoint refuse_until = std::min<TimePoint>(begin + kRefuseAtMost, deadline);
  while (!quiet() && context_.clock->Now() < refuse_until) absl::SleepFor(absl::Milliseconds(2));
  return true;
}

Server::~Server() {
  local_.reset();
  if (server_ == nullptr) return;
  self_check_.reset();  // it calls the server
  accept_loop_.reset();
  for (const std::string& address : addresses_) {
    if (const std::string path = UnixPath(address); !path.empty()) unlink(path.c_str());
  }
  server_->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  server_->Wait();
}

}  // namespace flashcore::server
