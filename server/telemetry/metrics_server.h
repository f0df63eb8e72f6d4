// The HTTP endpoint for Prometheus scrapes and health probes.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "server/telemetry/http_server.h"
#include "server/telemetry/metrics_token.h"

namespace flashcore::server {

// Answers GET and HEAD until it is destroyed:
//   /metrics  the metrics, in Prometheus's text format; 401 if a token is required and is not sent
//             as RFC 6750 says: "Authorization: Bearer TOKEN"
//   /healthz  200: the process is up
//   /readyz   200 if the server is ready, else 503
// Slow and silent clients do not delay others; see HttpServer, which owns the one thread.
class MetricsServer {
 public:
  struct Options {
    // "host:port". The host is an IPv4 address, an IPv6 address in brackets, a name, or empty for
    // all interfaces. Port 0 selects a free one.
    std::string address;
    // The first line of this file is the bearer token that /metrics requires; see MetricsToken.
    // Empty: no token is required.
    std::string token_file = {};
    std::function<bool()> ready = [] { return true; };  // runs on the server's thread
    Counter* token_reload_failures = nullptr;           // outlives the server; null: not counted
  };
  // `metrics` must outlive the server; null: there is no /metrics, only the probes.
  // INVALID_ARGUMENT if the address is malformed or the file has no token; UNAVAILABLE if the
  // server cannot listen on the address.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      Options options, const prometheus::Collectable* metrics);
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const { return port_; }
  const std::string& address() const { return address_; }  // "127.0.0.1:9464", with the actual port

 private:
  MetricsServer(Options options, const prometheus::Collectable* metrics);

  HttpReply Answer(const HttpRequest& request) const;
  // As Answer, for /metrics.
  HttpReply Scrape(absl::string_view authorization) const;

  const Options options_;
  const prometheus::Collectable* const metrics_;
  std::unique_ptr<MetricsToken> token_;  // of HttpServer's thread; null: no token is required
  std::string address_;
  int port_ = 0;
  std::unique_ptr<HttpServer> http_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_SERVER_H_
