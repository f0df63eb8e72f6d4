// Serves the metrics to Prometheus over HTTP.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_

#include <sys/socket.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"

namespace prometheus {
class Exposer;
}

namespace flashcore::server {

// Answers GET /metrics until it is destroyed. Two threads serve, so one slow scraper does not lock
// out another.
class MetricsServer {
 public:
  // Listens on "host:port": an IPv4 address, an IPv6 address in brackets, a name, or nothing (all
  // interfaces). Port 0 takes a free one. `metrics` must outlive the server. INVALID_ARGUMENT if
  // the address is none, UNAVAILABLE if it cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(absl::string_view address,
                                                              prometheus::Collectable* metrics);
  ~MetricsServer();  // waits for scrapes in progress
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const { return port_; }
  const std::string& address() const { return address_; }  // "127.0.0.1:9464", the real port

 private:
  MetricsServer();

  std::shared_ptr<prometheus::Collectable> metrics_;  // not owning
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string address_;
  int port_ = 0;
  sockaddr_storage listening_ = {};  // what the server was told to listen on, with the real port
  socklen_t listening_bytes_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
