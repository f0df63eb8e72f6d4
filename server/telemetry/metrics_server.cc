#include "server/telemetry/metrics_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "prometheus/exposer.h"

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

}  // namespace

MetricsServer::MetricsServer() = default;

MetricsServer::~MetricsServer() {
  if (exposer_ == nullptr) return;  // it did not start
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
  exposer_.reset();
  stopped = true;
  waker.join();
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    absl::string_view address, prometheus::Collectable* metrics) {
  absl::StatusOr<HostPort> target = ParseHostPort(address);
  if (!target.ok()) return target.status();
  absl::StatusOr<Addrinfo> resolved = Resolve(*target);
  if (!resolved.ok()) return resolved.status();
  const std::string host = NumericHost(**resolved);

  std::unique_ptr<MetricsServer> server(new MetricsServer);
  try {
    // A connection that sends nothing keeps one of the threads, so not for the default 30 s.
    server->exposer_ = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", absl::StrCat(host, ":", target->port),
                                 "num_threads", "2", "request_timeout_ms", "5000"});
    server->metrics_ = std::shared_ptr<prometheus::Collectable>(metrics, [](auto*) {});
    server->exposer_->RegisterCollectable(server->metrics_);
    server->port_ = server->exposer_->GetListeningPorts().at(0);
  } catch (const std::exception&) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", WhyNot(**resolved)));
  }
  server->address_ = absl::StrCat(host, ":", server->port_);
  server->listening_bytes_ = (*resolved)->ai_addrlen;
  std::memcpy(&server->listening_, (*resolved)->ai_addr, (*resolved)->ai_addrlen);
  const auto port = htons(static_cast<uint16_t>(server->port_));
  if (server->listening_.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&server->listening_)->sin6_port = port;
  } else {
    reinterpret_cast<sockaddr_in*>(&server->listening_)->sin_port = port;
  }
  return server;
}

}  // namespace flashcore::server
