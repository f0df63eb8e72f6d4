// How many connections are open, over both transports.
#ifndef FLASHCORE_SERVER_TRANSPORT_CONNECTION_COUNT_H_
#define FLASHCORE_SERVER_TRANSPORT_CONNECTION_COUNT_H_

#include <atomic>
#include <cstddef>
#include <string>

#include "server/base/socket.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// Each transport's loop sets its own count, which a gauge shows. Thread-safe.
class ConnectionCount {
 public:
  ConnectionCount(int limit, Gauge* grpc_gauge, Gauge* local_gauge)
      : limit_(static_cast<size_t>(limit)), grpc_gauge_(grpc_gauge), local_gauge_(local_gauge) {}

  void SetGrpc(size_t count) {
    grpc_ = count;
    grpc_gauge_->Set(static_cast<double>(count));
  }
  void SetLocal(size_t count) {
    local_ = count;
    local_gauge_->Set(static_cast<double>(count));
  }
  // One more would be too many.
  bool Full() const { return grpc_ + local_ >= limit_; }

 private:
  const size_t limit_;
  Gauge* const grpc_gauge_;
  Gauge* const local_gauge_;
  std::atomic<size_t> grpc_{0};
  std::atomic<size_t> local_{0};
};

// What connections are counted by: the address, the network of an IPv6 address, or the user at the
// other end of a Unix socket.
std::string ConnectionHost(int socket, const SocketAddress& peer);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_CONNECTION_COUNT_H_
