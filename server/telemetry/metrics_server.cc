#include "server/telemetry/metrics_server.h"

#include <fstream>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "prometheus/text_serializer.h"
#include "proto/wire/host_port.h"
#include "server/base/socket.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// The first line of the file.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  std::getline(file, token);
  absl::StripAsciiWhitespace(&token);
  if (token.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metrics token file \"", path, "\": it cannot be read, or its first line is empty"));
  }
  return token;
}

// Takes constant time for one length, so that a token cannot be guessed byte by byte.
bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

MetricsServer::MetricsServer(Options options, const prometheus::Collectable* metrics)
    : options_(std::move(options)), metrics_(metrics) {}

bool MetricsServer::MayScrape(absl::string_view authorization) const {
  if (options_.token_file.empty()) return true;
  const absl::StatusOr<std::string> token = ReadToken(options_.token_file);
  if (!token.ok()) {
    LogError("cannot check the metrics token", {{"error", token.status().message()}});
    return false;
  }
  return absl::ConsumePrefix(&authorization, "Bearer ") && SameSecret(authorization, *token);
}

HttpReply MetricsServer::Answer(const HttpRequest& request) const {
  if (request.path == "/healthz") return {200, "ok\n"};
  if (request.path == "/readyz") {
    const bool ready = options_.ready();
    return {ready ? 200U : 503U, ready ? "ok\n" : "not serving\n"};
  }
  if (request.path != "/metrics" || metrics_ == nullptr) return {404, "not found\n"};
  if (!MayScrape(request.authorization)) return {401, "the bearer token is missing or wrong\n"};
  return {200, prometheus::TextSerializer().Serialize(metrics_->Collect())};
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    Options options, const prometheus::Collectable* metrics) {
  const std::string address = options.address;
  const std::optional<HostPort> parsed = ParseHostPort(address);
  if (!parsed.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metrics address \"", address, "\": want HOST:PORT, with an IPv6 host in brackets"));
  }
  if (!options.token_file.empty()) {
    if (auto token = ReadToken(options.token_file); !token.ok()) return token.status();
  }
  auto sockets =
      ListenTcp(parsed->host.empty() ? "0.0.0.0" : std::string(parsed->host), parsed->port);
  if (absl::IsUnavailable(sockets.status())) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", sockets.status().message()));
  }
  if (!sockets.ok()) return sockets.status();
  std::unique_ptr<MetricsServer> server(new MetricsServer(std::move(options), metrics));
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
