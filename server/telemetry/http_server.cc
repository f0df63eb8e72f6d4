#include "server/telemetry/http_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxHeaderBytes = 8 << 10;
constexpr size_t kMaxIgnoredBytes = 64 << 10;

absl::string_view StatusText(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Service Unavailable";
  }
}

std::string Serialize(const HttpReply& reply) {
  return absl::StrCat("HTTP/1.1 ", reply.status, " ", StatusText(reply.status),
                      "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8",
                      "\r\nContent-Length: ", reply.body.size(), "\r\nConnection: close\r\n",
                      reply.header, "\r\n", reply.body);
}

// The next line of `text` without its end, which is removed.
absl::string_view TakeLine(absl::string_view* text) {
  const size_t end = std::min(text->find('\n'), text->size());
  absl::string_view line = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  absl::ConsumeSuffix(&line, "\r");
  return line;
}

absl::string_view TakeWord(absl::string_view* line) {
  const size_t end = std::min(line->find(' '), line->size());
  const absl::string_view word = line->substr(0, end);
  line->remove_prefix(std::min(end + 1, line->size()));
  return word;
}

bool IsWhole(absl::string_view header) {
  return absl::StrContains(header, "\r\n\r\n") || absl::StrContains(header, "\n\n");
}

}  // namespace

bool ParseHttpRequest(absl::string_view header, HttpRequest* request) {
  absl::string_view line = TakeLine(&header);
  request->method = TakeWord(&line);
  absl::string_view target = TakeWord(&line);
  if (request->method.empty() || !absl::StartsWith(line, "HTTP/1.")) return false;
  if (absl::ConsumePrefix(&target, "http://")) {
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  request->path = target.substr(0, target.find('?'));
  while (!(line = TakeLine(&header)).empty()) {
    const size_t colon = line.find(':');
    if (colon == absl::string_view::npos) return false;
    if (absl::EqualsIgnoreCase(line.substr(0, colon), "authorization")) {
      request->authorization = absl::StripAsciiWhitespace(line.substr(colon + 1));
    }
  }
  return true;
}

HttpServer::HttpServer(Options options, std::vector<FileDescriptor> sockets)
    : options_(std::move(options)),
      listening_(std::move(sockets)),
      timer_(options_.clock->NewTimer()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const auto watch = [&](int socket) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = socket;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event);
  };
  watch(stop_.get());
  watch(timer_->fd());
  for (const FileDescriptor& socket : listening_) watch(socket.get());
  thread_ = std::thread([this] { Loop(); });
}

HttpServer::~HttpServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void HttpServer::Loop() {
  std::array<epoll_event, 64> events;
  while (true) {
    timer_->Set(order_.empty() ? kNoDeadline : connections_.at(order_.front()).deadline);
    const int ready = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    std::vector<int> with_clients;
    for (int i = 0; i < ready; ++i) {
      const int socket = events[i].data.fd;
      if (socket == stop_.get()) return;
      if (connections_.count(socket) > 0) {
        OnEvent(socket);
      } else if (socket != timer_->fd()) {
        with_clients.push_back(socket);
      }
    }
    const TimePoint now = options_.clock->Now();
    while (!order_.empty() && connections_.at(order_.front()).deadline <= now) {
      Close(order_.front());
    }
    // Last: it closes and opens sockets, and the events above name them by number.
    for (const int listening : with_clients) AcceptAll(listening);
  }
}

void HttpServer::AcceptAll(int listening) {
  const auto admit = [this](FileDescriptor accepted, const SocketAddress& /*peer*/) {
    if (connections_.size() >= options_.max_connections) Close(order_.front());
    const int socket = accepted.get();
    Connection& connection = connections_[socket];
    connection.socket = std::move(accepted);
    connection.deadline = options_.clock->Now() + options_.time_limit;
    connection.order = order_.insert(order_.end(), socket);
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.fd = socket;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket, &event);
  };
  if (!acceptor_.AcceptAll(listening, admit, [] {})) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listening, nullptr);
  }
}

void HttpServer::OnEvent(int socket) {
  Connection& connection = connections_.at(socket);
  if (!Read(&connection) || !Write(&connection)) Close(socket);
}

bool HttpServer::Read(Connection* connection) {
  char buffer[4096];
  while (true) {
    const ssize_t bytes = recv(connection->socket.get(), buffer, sizeof(buffer), 0);
    if (bytes < 0) return errno == EAGAIN;
    // A client that has closed its side still reads the reply; one without a whole request is gone.
    if (bytes == 0) return connection->sent_bytes < connection->reply.size();
    if (connection->answered) {  // no second request, but unread bytes would reset the connection
      connection->ignored_bytes += static_cast<size_t>(bytes);
      if (connection->ignored_bytes > kMaxIgnoredBytes) return false;
      continue;
    }
    connection->request.append(buffer, static_cast<size_t>(bytes));
    if (IsWhole(connection->request) || connection->request.size() > kMaxHeaderBytes) {
      Answer(connection);
    }
  }
}

void HttpServer::Answer(Connection* connection) {
  HttpRequest request;
  HttpReply reply;
  if (!IsWhole(connection->request)) {
    reply = {431, "the header is too long\n", ""};
  } else if (!ParseHttpRequest(connection->request, &request)) {
    reply = {400, "not an HTTP/1.1 request\n", ""};
  } else if (request.method != "GET") {
    reply = {405, "GET only\n", "Allow: GET\r\n"};
  } else {
    reply = options_.answer(request);
  }
  connection->reply = Serialize(reply);
  connection->answered = true;
}

bool HttpServer::Write(Connection* connection) {
  const absl::string_view rest =
      absl::string_view(connection->reply).substr(connection->sent_bytes);
  if (rest.empty()) return true;
  const ssize_t bytes = send(connection->socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
  if (bytes < 0) return errno == EAGAIN;
  connection->sent_bytes += static_cast<size_t>(bytes);
  // The client closes once it has the reply. Closing first could discard what it has not yet read.
  if (connection->sent_bytes == connection->reply.size()) {
    shutdown(connection->socket.get(), SHUT_WR);
  }
  return true;
}

void HttpServer::Close(int socket) {
  const auto found = connections_.find(socket);
  order_.erase(found->second.order);
  connections_.erase(found);
}

}  // namespace flashcore::server
