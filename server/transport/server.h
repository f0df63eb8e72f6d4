// The gRPC server: listeners, services, health, reflection, and the drain.
#ifndef FLASHCORE_SERVER_TRANSPORT_SERVER_H_
#define FLASHCORE_SERVER_TRANSPORT_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server.h"
#include "server/engine/fleet.h"
#include "server/transport/attention_service.h"
#include "server/transport/debug_service.h"
#include "server/transport/grpc_poll_workaround.h"
#include "server/transport/rpc_scope.h"

namespace flashcore::server {

class Server {
 public:
  struct Options {
    std::vector<std::string> listen;  // "host:port" (port 0: a free one) or "unix:path"
    size_t max_message_bytes = 0;
    size_t transport_memory_bytes = 0;  // of all connections; see --transport_memory_bytes
    int max_stream_inflight = 0;
    UnsentReplies::Options unsent_replies;
    SharedMemory::Options shared_memory;
    bool enable_echo = false;
    std::string version;
  };

  // All methods of the services that `options` enables, for Metrics::Options.
  static std::vector<RpcMethod> Methods(const Options& options);

  // Listens and serves, with health SERVING. UNAVAILABLE if it cannot listen on an address.
  // `fleet` and `metrics` outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options, Fleet* fleet,
                                                       Metrics* metrics);
  ~Server();  // cancels the RPCs that still run, and waits for them

  // Options::listen with the chosen port in place of port 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Sets health to NOT_SERVING, refuses new requests and waits for those in flight. Shortly before
  // `timeout`, ends the requests that could not finish with UNAVAILABLE, and then cuts off clients
  // that do not read their replies. Returns before `timeout`; true unless a launch is still
  // running.
  bool Drain(absl::Duration timeout);

 private:
  Server(const Options& options, Fleet* fleet, Metrics* metrics);
  absl::Status Listen(const Options& options);

  // Waits until all RPCs of before the drain have ended, at most until `time`. False if some have
  // not.
  bool WaitForRpcs(absl::Time time) const;

  Fleet* const fleet_;
  RpcContext context_;
  AttentionService attention_;
  std::unique_ptr<DebugService> debug_;  // null: disabled
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<GrpcPollWorkaround> poll_workaround_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_SERVER_H_
