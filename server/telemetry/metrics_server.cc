#include "server/telemetry/metrics_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "civetweb.h"
#include "prometheus/text_serializer.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

struct AddrinfoDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addrinfo = std::unique_ptr<addrinfo, AddrinfoDeleter>;

struct HostPort {
  std::string host;  // may be empty; without brackets
  int port = 0;
};

absl::StatusOr<HostPort> ParseHostPort(absl::string_view address) {
  const absl::Status malformed = absl::InvalidArgumentError(absl::StrCat(
      "metrics address \"", address, "\": want HOST:PORT, with an IPv6 host in brackets"));
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return malformed;
  HostPort result;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &result.port) || result.port < 0 ||
      result.port > 65535) {
    return malformed;
  }
  absl::string_view host = address.substr(0, colon);
  const bool bracketed = absl::ConsumePrefix(&host, "[");
  if (bracketed && !absl::ConsumeSuffix(&host, "]")) return malformed;
  if (!bracketed && host.find(':') != absl::string_view::npos) return malformed;
  result.host = std::string(host);
  return result;
}

absl::StatusOr<Addrinfo> Resolve(const HostPort& target) {
  addrinfo hints = {};
  hints.ai_family = target.host.empty() ? AF_INET : AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(target.host.empty() ? nullptr : target.host.c_str(),
                                absl::StrCat(target.port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics host \"", target.host, "\": ", gai_strerror(error)));
  }
  return Addrinfo(list);
}

// The numeric host of `address`, an IPv6 one in brackets.
std::string NumericHost(const addrinfo& address) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return address.ai_family == AF_INET6 ? absl::StrCat("[", host, "]") : host;
}

// Why `address` cannot be listened on: the HTTP server does not say, so this tries by itself.
std::string WhyNot(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::strerror(errno);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  std::string reason = "the HTTP server did not start";
  if (bind(fd, address.ai_addr, address.ai_addrlen) != 0 || listen(fd, 1) != 0) {
    reason = std::strerror(errno);
  }
  close(fd);
  return reason;
}

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

// Takes as long wherever they differ, so that a token cannot be guessed byte by byte.
bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

// Answers a GET with `body`, anything else with 405. `header`: more header lines, each with its
// CRLF. Returns the status.
int Reply(mg_connection* connection, int status, absl::string_view body,
          absl::string_view header = "") {
  if (absl::string_view(mg_get_request_info(connection)->request_method) != "GET") {
    status = 405;
    body = "GET only\n";
    header = "Allow: GET\r\n";
  }
  const std::string head = absl::StrCat(
      "HTTP/1.1 ", status, " ", mg_get_response_code_text(connection, status),
      "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: ", body.size(),
      "\r\nConnection: close\r\n", header, "\r\n");
  mg_write(connection, head.data(), head.size());
  mg_write(connection, body.data(), body.size());
  return status;
}

int OnHealthz(mg_connection* connection, void* /*server*/) {
  return Reply(connection, 200, "ok\n");
}

}  // namespace

MetricsServer::MetricsServer(Options options, const prometheus::Collectable* metrics)
    : options_(std::move(options)), metrics_(metrics) {}

MetricsServer::~MetricsServer() {
  if (http_ == nullptr) return;  // it did not start
  // The HTTP server looks whether it should stop every 2 s, or when somebody connects.
  std::atomic<bool> stopped{false};
  std::thread waker([&] {
    while (!stopped) {
      const int fd = socket(listening_.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      if (fd >= 0) {
        connect(fd, reinterpret_cast<const sockaddr*>(&listening_), listening_bytes_);
        close(fd);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  mg_stop(http_);
  stopped = true;
  waker.join();
}

bool MetricsServer::MayScrape(const mg_connection* connection) const {
  if (options_.token_file.empty()) return true;
  const absl::StatusOr<std::string> token = ReadToken(options_.token_file);
  if (!token.ok()) {
    LogError("cannot check who scrapes", {{"error", token.status().message()}});
    return false;
  }
  const char* header = mg_get_header(connection, "Authorization");
  absl::string_view given = header == nullptr ? "" : header;
  return absl::ConsumePrefix(&given, "Bearer ") && SameSecret(given, *token);
}

int MetricsServer::OnMetrics(mg_connection* connection, void* server) {
  const auto* self = static_cast<const MetricsServer*>(server);
  if (!self->MayScrape(connection)) {
    return Reply(connection, 401, "the bearer token is missing or wrong\n",
                 "WWW-Authenticate: Bearer\r\n");
  }
  return Reply(connection, 200, prometheus::TextSerializer().Serialize(self->metrics_->Collect()));
}

int MetricsServer::OnReadyz(mg_connection* connection, void* server) {
  const bool ready = static_cast<const MetricsServer*>(server)->options_.ready();
  return Reply(connection, ready ? 200 : 503, ready ? "ok\n" : "not serving\n");
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    Options options, const prometheus::Collectable* metrics) {
  absl::StatusOr<HostPort> target = ParseHostPort(options.address);
  if (!target.ok()) return target.status();
  absl::StatusOr<Addrinfo> resolved = Resolve(*target);
  if (!resolved.ok()) return resolved.status();
  if (!options.token_file.empty()) {
    if (auto token = ReadToken(options.token_file); !token.ok()) return token.status();
  }
  const std::string host = NumericHost(**resolved);
  const std::string listen = absl::StrCat(host, ":", target->port);

  std::unique_ptr<MetricsServer> server(new MetricsServer(std::move(options), metrics));
  const mg_callbacks no_callbacks = {};
  // A connection that sends nothing keeps one of the threads, so not for the default 30 s.
  const char* settings[] = {"listening_ports",    listen.c_str(), "num_threads", "2",
                            "request_timeout_ms", "5000",         nullptr};
  server->http_ = mg_start(&no_callbacks, nullptr, settings);
  if (server->http_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", server->options_.address,
                                               ": ", WhyNot(**resolved)));
  }
  mg_set_request_handler(server->http_, "/metrics$", OnMetrics, server.get());
  mg_set_request_handler(server->http_, "/healthz$", OnHealthz, server.get());
  mg_set_request_handler(server->http_, "/readyz$", OnReadyz, server.get());
  mg_server_port port = {};
  mg_get_server_ports(server->http_, 1, &port);
  server->port_ = port.port;
  server->address_ = absl::StrCat(host, ":", server->port_);
  server->listening_bytes_ = (*resolved)->ai_addrlen;
  std::memcpy(&server->listening_, (*resolved)->ai_addr, (*resolved)->ai_addrlen);
  const auto network_port = htons(static_cast<uint16_t>(server->port_));
  if (server->listening_.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&server->listening_)->sin6_port = network_port;
  } else {
    reinterpret_cast<sockaddr_in*>(&server->listening_)->sin_port = network_port;
  }
  return server;
}

}  // namespace flashcore::server
