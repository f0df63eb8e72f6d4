#include "server/telemetry/metrics_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "civetweb.h"
#include "prometheus/text_serializer.h"
#include "proto/host_port.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

struct AddrinfoDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addrinfo = std::unique_ptr<addrinfo, AddrinfoDeleter>;

// Resolves "host:port".
absl::StatusOr<Addrinfo> Resolve(absl::string_view address) {
  const std::optional<HostPort> parsed = ParseHostPort(address);
  if (!parsed.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metrics address \"", address, "\": want HOST:PORT, with an IPv6 host in brackets"));
  }
  addrinfo hints = {};
  const std::string host(parsed->host);
  hints.ai_family = host.empty() ? AF_INET : AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                absl::StrCat(parsed->port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics host \"", host, "\": ", gai_strerror(error)));
  }
  return Addrinfo(list);
}

// The numeric host of `address`; IPv6 in brackets.
std::string NumericHost(const addrinfo& address) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return address.ai_family == AF_INET6 ? absl::StrCat("[", host, "]") : host;
}

// Why the server cannot listen on `address`. The HTTP server does not say, so this tries again.
std::string ListenError(const addrinfo& address) {
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

// Takes constant time for one length, so that a token cannot be guessed byte by byte.
bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

// Answers a GET with `body`, any other method with 405. `header`: more header lines, each ending
// with CRLF. Returns the status.
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

}  // namespace

MetricsServer::MetricsServer(Options options, const prometheus::Collectable* metrics)
    : options_(std::move(options)), metrics_(metrics) {}

MetricsServer::~MetricsServer() {
  if (http_ == nullptr) return;  // it did not start
  // The HTTP server checks whether it should stop every 2 s, and at each connection.
  std::atomic<bool> stopped{false};
  std::thread waker([&] {
    char error[64];
    while (!stopped) {
      if (mg_connection* wake =
              mg_connect_client(host_.c_str(), port_, /*use_ssl=*/0, error, sizeof(error))) {
        mg_close_connection(wake);
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
    LogError("cannot check the metrics token", {{"error", token.status().message()}});
    return false;
  }
  const char* header = mg_get_header(connection, "Authorization");
  absl::string_view given = header == nullptr ? "" : header;
  return absl::ConsumePrefix(&given, "Bearer ") && SameSecret(given, *token);
}

int MetricsServer::AnswerScrape(mg_connection* connection) const {
  if (!MayScrape(connection)) {
    return Reply(connection, 401, "the bearer token is missing or wrong\n",
                 "WWW-Authenticate: Bearer\r\n");
  }
  return Reply(connection, 200, prometheus::TextSerializer().Serialize(metrics_->Collect()));
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    Options options, const prometheus::Collectable* metrics) {
  absl::StatusOr<Addrinfo> resolved = Resolve(options.address);
  if (!resolved.ok()) return resolved.status();
  if (!options.token_file.empty()) {
    if (auto token = ReadToken(options.token_file); !token.ok()) return token.status();
  }
  std::unique_ptr<MetricsServer> server(new MetricsServer(std::move(options), metrics));
  const std::string& address = server->options_.address;
  server->host_ = NumericHost(**resolved);
  const std::string listen = absl::StrCat(server->host_, address.substr(address.rfind(':')));
  // A silent connection occupies a thread; the default timeout is 30 s.
  const char* settings[] = {"listening_ports",    listen.c_str(), "num_threads", "2",
                            "request_timeout_ms", "5000",         nullptr};
  server->http_ = mg_start(/*callbacks=*/nullptr, nullptr, settings);
  if (server->http_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", ListenError(**resolved)));
  }
  const auto handle = [&](const char* path, mg_request_handler handler) {
    mg_set_request_handler(server->http_, path, handler, server.get());
  };
  handle("/metrics$", [](mg_connection* connection, void* self) {
    return static_cast<const MetricsServer*>(self)->AnswerScrape(connection);
  });
  handle("/healthz$",
         [](mg_connection* connection, void*) { return Reply(connection, 200, "ok\n"); });
  handle("/readyz$", [](mg_connection* connection, void* self) {
    const bool ready = static_cast<const MetricsServer*>(self)->options_.ready();
    return Reply(connection, ready ? 200 : 503, ready ? "ok\n" : "not serving\n");
  });
  mg_server_port port = {};
  mg_get_server_ports(server->http_, 1, &port);
  server->port_ = port.port;
  server->address_ = absl::StrCat(server->host_, ":", server->port_);
  return server;
}

}  // namespace flashcore::server
