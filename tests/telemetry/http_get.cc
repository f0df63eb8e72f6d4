#include "tests/telemetry/http_get.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace flashcore::server {

namespace {

// A socket, or -1.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace

SilentConnection::SilentConnection(int port, const std::string& text) : fd_(Connect(port)) {
  if (write(fd_, text.data(), text.size()) < 0) close(std::exchange(fd_, -1));
}

SilentConnection::~SilentConnection() {
  if (fd_ >= 0) close(fd_);
}

bool SilentConnection::ended() const {
  char byte = 0;
  return recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

bool SilentConnection::WaitUntilEnded() const {
  pollfd waiting = {fd_, POLLIN, 0};
  return poll(&waiting, 1, 60'000) == 1;
}

std::string HttpExchange(int port, const std::string& request) {
  const int fd = Connect(port);
  std::string response;
  if (fd >= 0) {
    char buffer[4096];
    ssize_t bytes = write(fd, request.data(), request.size());
    while (bytes > 0 && (bytes = read(fd, buffer, sizeof(buffer))) > 0) {
      response.append(buffer, static_cast<size_t>(bytes));
    }
  }
  close(fd);
  return response;
}

std::string HttpGet(int port, const std::string& path, const std::string& header) {
  return HttpExchange(
      port,
      "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + "\r\n");
}

std::string HttpHeader(const std::string& response, const std::string& name) {
  const std::string line = "\r\n" + name + ": ";
  const size_t begin = response.find(line);
  if (begin == std::string::npos || begin > response.find("\r\n\r\n")) return "";
  const size_t value = begin + line.size();
  return response.substr(value, response.find("\r\n", value) - value);
}

std::string HttpBody(const std::string& response) {
  const size_t end = response.find("\r\n\r\n");
  return end == std::string::npos ? "" : response.substr(end + 4);
}

}  // namespace flashcore::server
