// Serves the metrics to Prometheus over HTTP, and says whether the process is well.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "prometheus/collectable.h"

struct mg_connection;
struct mg_context;

namespace flashcore::server {

// Answers GET until it is destroyed:
//   /metrics  the metrics, in Prometheus's text format; 401 without the token, if one is asked for
//   /healthz  200: the process is up
//   /readyz   200 if it is ready, else 503
// Two threads serve, so one slow scraper does not lock out another.
class MetricsServer {
 public:
  struct Options {
    // "host:port": an IPv4 address, an IPv6 address in brackets, a name, or nothing (all
    // interfaces). Port 0 takes a free one.
    std::string address;
    // The first line of this file is the bearer token that /metrics asks for. Read at every scrape,
    // so that it can be replaced. Empty: anyone may scrape.
    std::string token_file = {};
    std::function<bool()> ready = [] { return true; };  // on the threads that serve
  };
  // `metrics` must outlive the server. INVALID_ARGUMENT if the address is none or the file has no
  // token, UNAVAILABLE if the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      Options options, const prometheus::Collectable* metrics);
  ~MetricsServer();  // waits for scrapes in progress
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const { return port_; }
  const std::string& address() const { return address_; }  // "127.0.0.1:9464", the real port

 private:
  MetricsServer(Options options, const prometheus::Collectable* metrics);

  bool MayScrape(const mg_connection* connection) const;
  static int OnMetrics(mg_connection* connection, void* server);
  static int OnReadyz(mg_connection* connection, void* server);

  const Options options_;
  const prometheus::Collectable* const metrics_;
  mg_context* http_ = nullptr;
  std::string address_;
  int port_ = 0;
  sockaddr_storage listening_ = {};  // what the server was told to listen on, with the real port
  socklen_t listening_bytes_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
