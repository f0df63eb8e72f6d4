// A scrape, as Prometheus makes one.
#ifndef FLASHCORE_TESTS_TELEMETRY_HTTP_GET_H_
#define FLASHCORE_TESTS_TELEMETRY_HTTP_GET_H_

#include <string>

namespace flashcore::server {

// The whole response of 127.0.0.1:`port` to `request`; empty if there is none.
std::string HttpExchange(int port, const std::string& request);

// The whole response of 127.0.0.1:`port` to GET `path`; empty if there is none. `header`: more
// header lines, each with its CRLF.
std::string HttpGet(int port, const std::string& path, const std::string& header = "");

// A connection on which the client has sent `text`, perhaps a part of a request, and then is
// silent.
class SilentConnection {
 public:
  SilentConnection(int port, const std::string& text);
  ~SilentConnection();
  SilentConnection(const SilentConnection&) = delete;
  SilentConnection& operator=(const SilentConnection&) = delete;

  // The server has answered or closed it.
  bool ended() const;
  // Waits for that. False after a minute.
  bool WaitUntilEnded() const;

 private:
  int fd_;
};

// The value of the first header line `name` of `response`; empty if there is none.
std::string HttpHeader(const std::string& response, const std::string& name);

// The content that follows the header of `response`.
std::string HttpBody(const std::string& response);

}  // namespace flashcore::server

#endif  // FLASHCORE_TESTS_TELEMETRY_HTTP_GET_H_
