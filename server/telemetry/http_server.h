// A small HTTP/1.1 server that slow and silent clients cannot occupy.
#ifndef FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_
#define FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/socket.h"

namespace flashcore::server {

struct HttpRequest {
  absl::string_view method;         // "GET"
  absl::string_view path;           // "/metrics", without the query
  absl::string_view authorization;  // the header's value; empty if there is none
};

struct HttpReply {
  int status = 200;
  std::string body;
  std::string header;  // more header lines, each ending with CRLF
};

// Parses the header of a request, with the empty line that ends it. False if it is malformed.
bool ParseHttpRequest(absl::string_view header, HttpRequest* request);

// Answers one request on each connection. A connection costs no thread, only memory, and ends after
// `time_limit`, whatever its client does. When there are `max_connections`, a new one ends the
// oldest: a client that sends its request at once and reads the reply at once is served, however
// many others do not. Owns one thread.
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
  struct Connection {
    FileDescriptor socket;
    TimePoint deadline;
    std::list<int>::iterator order;  // in order_
    std::string request;             // as far as it has come
    size_t ignored_bytes = 0;        // that came after it
    std::string reply;
    size_t sent_bytes = 0;  // of the reply
    bool answered = false;
  };

  void Loop();
  void AcceptAll(int listening);
  void OnEvent(int socket);
  // Each returns false if the connection has ended.
  bool Read(Connection* connection);
  bool Write(Connection* connection);
  void Answer(Connection* connection);
  void Close(int socket);

  const Options options_;
  std::vector<FileDescriptor> listening_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor epoll_;
  const FileDescriptor stop_;  // an eventfd
  Acceptor acceptor_;
  std::unordered_map<int, Connection> connections_;  // by socket
  std::list<int> order_;                             // sockets, the oldest first
  std::thread thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_HTTP_SERVER_H_
