#include "server/telemetry/http_server.h"

#include <microhttpd.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {
namespace {

constexpr size_t kConnectionBytes = 16 << 10;  // the header of a request and that of its reply

MHD_Result Send(MHD_Connection* connection, HttpReply reply) {
  MHD_Response* const response =
      MHD_create_response_from_buffer(reply.body.size(), reply.body.data(), MHD_RESPMEM_MUST_COPY);
  const auto add = [response](const char* name, const char* value) {
    MHD_add_response_header(response, name, value);
  };
  add(MHD_HTTP_HEADER_CONTENT_TYPE, reply.content_type);
  add(MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
  add(MHD_HTTP_HEADER_CONNECTION, "close");
  if (!reply.challenge.empty()) add(MHD_HTTP_HEADER_WWW_AUTHENTICATE, reply.challenge.c_str());
  if (reply.status == MHD_HTTP_METHOD_NOT_ALLOWED) add(MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  const MHD_Result queued = MHD_queue_response(connection, reply.status, response);
  MHD_destroy_response(response);
  return queued;
}

// "/metrics" of that or of "http://host:port/metrics", as a proxy sends it.
absl::string_view PathOf(absl::string_view target) {
  for (const absl::string_view scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase(target, scheme)) continue;
    const size_t slash = target.find('/', scheme.size());
    return slash == absl::string_view::npos ? "/" : target.substr(slash);
  }
  return target;
}

}  // namespace

struct HttpServer::Callbacks {
  static MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* target,
                              const char* method, const char* version, const char* /*body*/,
                              size_t* /*body_bytes*/, void** /*context*/) {
    const auto header = [connection](const char* name) {
      return MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
    };
    if (version == absl::string_view(MHD_HTTP_VERSION_1_1) &&
        header(MHD_HTTP_HEADER_HOST) == nullptr) {
      return Send(connection, {MHD_HTTP_BAD_REQUEST, "HTTP/1.1 needs the header Host\n"});
    }
    if (method != absl::string_view(MHD_HTTP_METHOD_GET) &&
        method != absl::string_view(MHD_HTTP_METHOD_HEAD)) {
      return Send(connection, {MHD_HTTP_METHOD_NOT_ALLOWED, "GET and HEAD only\n"});
    }
    const HttpRequest request = {PathOf(target),
                                 absl::NullSafeStringView(header(MHD_HTTP_HEADER_AUTHORIZATION))};
    return Send(connection, static_cast<HttpServer*>(self)->options_.answer(request));
  }

  static void OnConnection(void* self, MHD_Connection* connection, void** /*context*/,
                           MHD_ConnectionNotificationCode event) {
    if (event != MHD_CONNECTION_NOTIFY_CLOSED) return;
    const int socket =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    auto& connections = static_cast<HttpServer*>(self)->connections_;
    const auto closed = std::find_if(connections.begin(), connections.end(),
                                     [socket](const auto& one) { return one.socket == socket; });
    if (closed != connections.end()) connections.erase(closed);
  }
};

HttpServer::HttpServer(Options options, std::vector<FileDescriptor> sockets)
    : options_(std::move(options)),
      listening_(std::move(sockets)),
      timer_(options_.clock->NewTimer()),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      // Its own limit, 1020 connections, counts those that EndOldest has ended until MHD_run.
      daemon_(MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET, /*port=*/0, nullptr,
                               nullptr, &Callbacks::OnRequest, this, MHD_OPTION_NOTIFY_CONNECTION,
                               &Callbacks::OnConnection, this, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                               kConnectionBytes, MHD_OPTION_END)) {
  if (daemon_ == nullptr) std::abort();  // no memory, or no file: nothing works
  thread_ = std::thread([this] { Loop(); });
}

HttpServer::~HttpServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
  MHD_stop_daemon(daemon_);
}

void HttpServer::Loop() {
  const int epoll = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
  std::vector<pollfd> files;
  for (const FileDescriptor& socket : listening_) files.push_back({socket.get(), POLLIN, 0});
  for (const int file : {timer_->fd(), epoll, stop_.get()}) files.push_back({file, POLLIN, 0});
  while (true) {
    timer_->Set(connections_.empty() ? kNoDeadline : connections_.front().deadline);
    MHD_UNSIGNED_LONG_LONG wait_ms = 0;  // without time limits of its own: 0, or none
    const bool has_more = MHD_get_timeout(daemon_, &wait_ms) == MHD_YES;
    poll(files.data(), files.size(), has_more ? 0 : -1);
    if (files.back().revents != 0) return;
    for (size_t i = 0; i < listening_.size(); ++i) {
      if (files[i].revents != 0 && !AcceptAll(files[i].fd)) files[i].fd = -1;
    }
    const TimePoint now = options_.clock->Now();
    while (!connections_.empty() && connections_.front().deadline <= now) EndOldest();
    MHD_run(daemon_);
  }
}

bool HttpServer::AcceptAll(int listening) {
  const auto admit = [this](FileDescriptor accepted, const SocketAddress& peer) {
    if (connections_.size() >= options_.max_connections) EndOldest();
    const int socket = accepted.release();
    if (MHD_add_connection(daemon_, socket, peer.get(), peer.size) != MHD_YES) return;  // closed
    connections_.push_back({socket, options_.clock->Now() + options_.time_limit});
  };
  return acceptor_.AcceptAll(listening, admit, [] {});
}

void HttpServer::EndOldest() {
  shutdown(connections_.front().socket, SHUT_RDWR);  // libmicrohttpd sees it and closes the socket
  connections_.pop_front();
}

}  // namespace flashcore::server
