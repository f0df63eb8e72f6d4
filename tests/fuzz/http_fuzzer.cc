// Sends bytes to the metrics port. Whatever they are, the server answers a closed connection, gives
// metrics only for the token, and goes on serving.
//
// An input is one byte, the size of the pieces in which the rest is sent (0: in one), and the
// bytes.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/metrics_server.h"
#include "tests/fuzz/require.h"
#include "tests/telemetry/example_metrics.h"

namespace flashcore::fuzz {
namespace {

using server::Metrics;
using server::MetricsServer;

constexpr absl::string_view kToken = "secret";

// A metrics server whose token is in a file without a name.
MetricsServer& Server() {
  static MetricsServer* const kServer = [] {
    const int file = memfd_create("token", 0);
    Require(write(file, kToken.data(), kToken.size()) == static_cast<ssize_t>(kToken.size()),
            "no token file");
    auto* const metrics = new Metrics(server::ExampleOptions());
    return MetricsServer::Start({"127.0.0.1:0", absl::StrCat("/proc/self/fd/", file)}, metrics)
        .value()
        .release();
  }();
  return *kServer;
}

sockaddr_in Loopback(uint32_t offset, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + offset);
  return address;
}

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  // From one address after the other: a connection that has ended keeps its port for a while, and
  // an address has 28,000.
  static uint32_t connections = 0;
  const sockaddr_in from = Loopback(++connections % 65536, 0);
  setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  Require(bind(fd, reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0, "no address");
  const sockaddr_in to = Loopback(0, port);
  Require(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0, "no connection");
  const timeval patience = {60, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

// All that the server answers to `bytes`, sent in pieces, and the end of the connection.
std::string Answer(absl::string_view bytes, size_t piece_bytes) {
  const int fd = Connect(Server().port());
  while (!bytes.empty()) {
    const size_t piece = piece_bytes == 0 ? bytes.size() : std::min(piece_bytes, bytes.size());
    const ssize_t sent = send(fd, bytes.data(), piece, MSG_NOSIGNAL);
    if (sent <= 0) break;  // the server may close before it has read all
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  shutdown(fd, SHUT_WR);
  std::string answer;
  char buffer[4096];
  ssize_t received = 0;
  while ((received = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
    answer.append(buffer, static_cast<size_t>(received));
  }
  Require(received == 0 || (errno != EAGAIN && errno != EWOULDBLOCK), "no answer in a minute");
  close(fd);
  return answer;
}

// Errors that the HTTP server writes itself can repeat any part of the request, so only success is
// looked at.
void CheckInput(const std::string& bytes, size_t piece_bytes) {
  const std::string answer = Answer(bytes, piece_bytes);
  const bool success = absl::StartsWith(answer, "HTTP/1.1 200 ");
  if (absl::StrContains(answer, "# TYPE flashcore_")) {
    Require(success && absl::StrContains(bytes, absl::StrCat("Bearer ", kToken)),
            "metrics without the token");
  } else if (success) {
    Require(absl::EndsWith(answer, "\r\n\r\nok\n"), absl::StrCat("a page of its own: ", answer));
  }
}

void CheckServing() {
  const std::string answer = Answer("GET /healthz HTTP/1.0\r\n\r\n", 0);
  Require(absl::StartsWith(answer, "HTTP/1.1 200 "), "it does not serve any more: " + answer);
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static int count = 0;
  if (size == 0) return 0;
  flashcore::fuzz::CheckInput(std::string(data + 1, data + size), data[0]);
  if (++count % 64 == 0) flashcore::fuzz::CheckServing();
  return 0;
}
