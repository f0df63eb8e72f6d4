#include "server/telemetry/metrics_server.h"

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "prometheus/text_serializer.h"
#include "proto/wire/host_port.h"
#include "server/base/socket.h"

namespace flashcore::server {

namespace {

constexpr char kMetricsContentType[] = "text/plain; version=0.0.4; charset=utf-8";

// The token of "Bearer TOKEN"; empty for another scheme, or if there is none.
absl::string_view BearerToken(absl::string_view authorization) {
  constexpr absl::string_view kScheme = "Bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return "";
  return absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
}

}  // namespace

MetricsServer::MetricsServer(Options options, const prometheus::Collectable* metrics)
    : options_(std::move(options)), metrics_(metrics) {}

HttpReply MetricsServer::Answer(const HttpRequest& request) const {
  if (request.path == "/healthz") return {200, "ok\n"};
  if (request.path == "/readyz") {
    const bool ready = options_.ready();
    return {ready ? 200U : 503U, ready ? "ok\n" : "not serving\n"};
  }
  if (request.path != "/metrics" || metrics_ == nullptr) return {404, "not found\n"};
  return Scrape(request.authorization);
}

HttpReply MetricsServer::Scrape(absl::string_view authorization) const {
  if (token_ != nullptr) {
    // RFC 6750: no error code for a request without a token.
    HttpReply refused = {401, "the bearer token is missing\n"};
    refused.challenge = "Bearer realm=\"flashcore\"";
    const absl::string_view sent = BearerToken(authorization);
    if (sent.empty()) return refused;
    if (!token_->Is(sent)) {
      refused.body = "the bearer token is wrong\n";
      refused.challenge += ", error=\"invalid_token\"";
      return refused;
    }
  }
  return {200, prometheus::TextSerializer().Serialize(metrics_->Collect()), kMetricsContentType};
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    Options options, const prometheus::Collectable* metrics) {
  const std::string address = options.address;
  const std::optional<HostPort> parsed = ParseHostPort(address);
  if (!parsed.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metrics address \"", address, "\": want HOST:PORT, with an IPv6 host in brackets"));
  }
  std::unique_ptr<MetricsToken> token;
  if (!options.token_file.empty()) {
    auto opened = MetricsToken::Open(options.token_file, options.token_reload_failures);
    if (!opened.ok()) return opened.status();
    token = *std::move(opened);
  }
  auto sockets =
      ListenTcp(parsed->host.empty() ? "0.0.0.0" : std::string(parsed->host), parsed->port);
  if (absl::IsUnavailable(sockets.status())) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", sockets.status().message()));
  }
  if (!sockets.ok()) return sockets.status();
  std::unique_ptr<MetricsServer> server(new MetricsServer(std::move(options), metrics));
  server->token_ = std::move(token);
  const SocketAddress bound = LocalAddress(sockets->front().get());
  server->port_ = PortOf(bound);
  const std::string host = HostOf(bound);
  server->address_ = absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", server->port_)
                                                  : absl::StrCat(host, ":", server->port_);
  HttpServer::Options http;
  http.answer = [self = server.get()](const HttpRequest& request) { return self->Answer(request); };
  server->http_ = std::make_unique<HttpServer>(std::move(http), *std::move(sockets));
  return server;
}

}  // namespace flashcore::server
