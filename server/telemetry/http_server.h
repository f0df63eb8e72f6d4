// A small HTTP/1.1 server that slow and silent clients cannot occupy.
#ifndef FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_
#define FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/socket.h"

struct MHD_Daemon;

namespace flashcore::server {

struct HttpRequest {
  absl::string_view path;           // "/metrics", without scheme, host and query
  absl::string_view authorization;  // the header's value; empty if there is none
};

struct HttpReply {
  unsigned status = 200;
  std::string body;  // UTF-8 text
  const char* content_type = "text/plain; charset=utf-8";
  std::string challenge = {};  // WWW-Authenticate, which a 401 must have; empty: none
};

// Answers one GET or HEAD on each connection; libmicrohttpd reads it, writes the reply and leaves
// out the body of one to HEAD. Every reply says that it must not be cached. A connection
// costs no thread, only memory, and ends after `time_limit`, whatever its client does. When there
// are `max_connections`, a new one ends the oldest: a client that sends its request at once and
// reads the reply at once is served, however many others do not. Owns one thread.
class HttpServer {
 public:
  struct Options {
    std::function<HttpReply(const HttpRequest&)> answer;  // runs on the server's thread
    size_t max_connections = 256;
    std::chrono::milliseconds time_limit{5000};
    const Clock* clock = SteadyClock::Get();  // outlives the server
  };
  // `sockets` listen, non-blocking.
  HttpServer(Options options, std::vector<FileDescriptor> sockets);
  ~HttpServer();  // waits for an answer that is being made
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  struct Callbacks;  // what libmicrohttpd calls, on the thread
  struct Connection {
    int socket;  // libmicrohttpd owns it
    TimePoint deadline;
  };

  void Loop();
  bool AcceptAll(int listening);
  void EndOldest();

  const Options options_;
  const std::vector<FileDescriptor> listening_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor stop_;  // an eventfd
  Acceptor acceptor_;
  std::deque<Connection> connections_;  // the oldest first, without those that EndOldest has ended
  MHD_Daemon* const daemon_;
  std::thread thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_
