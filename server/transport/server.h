// The gRPC server: listeners, services, health, reflection, and the drain.
#ifndef FLASHCORE_SERVER_TRANSPORT_SERVER_H_
#define FLASHCORE_SERVER_TRANSPORT_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/access/authenticator.h"
#include "server/access/client_connections.h"
#include "server/access/credential_files.h"
#include "server/base/socket.h"
#include "server/engine/fleet.h"
#include "server/transport/grpc/attention_service.h"
#include "server/transport/grpc/guard/accept_loop.h"
#include "server/transport/grpc/guard/self_check.h"
#include "server/transport/grpc/reflection.h"
#include "server/transport/local/server.h"
#include "server/transport/rpc/passed_files.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

class Server {
 public:
  struct Connections {
    int max = 1024;              // each door (door.h) that is open has an equal part
    int max_per_host = 256;      // at each door; see ConnectionClient
    AcceptLoop::Options accept;  // whose `connections` follow from the above
    int max_per_client = 256;    // see ClientConnections
    int max_streams = 256;       // RPCs at the same time on one connection
    absl::Duration handshake_timeout = absl::Seconds(10);
    absl::Duration max_age = absl::InfiniteDuration();  // infinite: no limit
  };
  struct Options {
    std::vector<std::string> listen;  // "host:port" (port 0: a free one) or "unix:path"
    UnixSocketAccess unix_sockets;    // of `listen` and `local_listen`
    Connections connections;
    SelfCheck::Options self_check;
    // An address, or gRPC in this process, will never serve again. From any thread.
    std::function<void(const std::string& address, const absl::Status& why)> on_dead;
    std::function<void(bool serving)> on_health;  // whenever that changes
    size_t max_message_bytes = 0;
    size_t transport_memory_bytes = 0;  // of all connections; see --transport_memory_bytes
    int max_stream_inflight = 64;  // unanswered requests of one AttendStream; then it is not read
    UnsentReplies::Options unsent_replies;
    SharedMemory::Options shared_memory;
    DeviceMemory::Options device_memory{/*total_bytes=*/0};
    CredentialFiles::Options credentials;
    std::string local_listen;  // path of the local socket; empty: none
    // Its client_certificates and needs_tokens follow from `credentials`.
    Authenticator::Options authenticator;
    bool enable_reflection = false;
    std::string version;
  };

  // All methods of the services that `options` enables, for Metrics::Options.
  static std::vector<RpcMethod> Methods(const Options& options);

  // Listens and serves, with health SERVING. UNAVAILABLE if it cannot listen on an address;
  // INVALID_ARGUMENT if a file of Options::credentials cannot be used.
  // `fleet` and `metrics` outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options, Fleet* fleet,
                                                       Metrics* metrics);
  ~Server();  // cancels the RPCs that still run, and waits for them

  // Options::listen with the chosen port in place of port 0; then "local:path", if there is one.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Reads the files of Options::credentials soon, on a thread of theirs.
  void ReloadCredentials() { credentials_->ReloadSoon(); }

  // Sets health to NOT_SERVING, refuses new requests and waits for those in flight. Shortly before
  // `timeout`, ends the requests that could not finish with UNAVAILABLE, and then cuts off clients
  // that do not read their replies. Returns before `timeout`; true unless a launch is still
  // running.
  bool Drain(absl::Duration timeout);

 private:
  Server(const Options& options, Fleet* fleet, Metrics* metrics);
  absl::Status ReadCredentials(const Options& options);
  absl::Status Listen(const Options& options);
  absl::Status ListenLocally(const Options& options);
  // Opens the sockets of one of Options::listen; gRPC serves their connections, over TCP with TLS
  // if there are certificates.
  absl::Status OpenSockets(const std::string& address, const UnixSocketAccess& unix_sockets,
                           grpc::ServerBuilder* builder,
                           std::vector<AcceptLoop::Listener>* listeners);
  void SetServing(bool serving);
  AcceptLoop::Serve ServePlaintext();
  AcceptLoop::Serve ServeTls(grpc::ServerBuilder* builder);

  // Waits until all RPCs of before the drain have ended, at most until `time`. False if some have
  // not.
  bool WaitForRpcs(TimePoint time) const;

  Fleet* const fleet_;
  const std::function<void(bool serving)> on_health_;
  PassedFiles passed_files_;
  ClientConnections client_connections_;
  RpcContext context_;
  AttentionMethods methods_;
  AttentionService attention_;
  Reflection reflection_;
  std::unique_ptr<CredentialFiles> credentials_;  // its thread calls the services
  std::vector<std::string> addresses_;
  std::vector<std::shared_ptr<grpc::ServerCredentials>> tls_;  // of the addresses with TLS
  std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>> acceptors_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<AcceptLoop> accept_loop_;
  std::unique_ptr<SelfCheck> self_check_;
  std::unique_ptr<local::Server> local_;  // null: no local socket
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_SERVER_H_
