#include "server/transport/grpc/accept_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// What every HTTP/2 client sends first: this, and a SETTINGS frame, whose header is its length in 3
// bytes, its type, flags and the number of a stream. A TLS ClientHello is longer than the preface.
constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kFrameHeader = 9;

constexpr std::chrono::milliseconds kFloodCheckInterval(50);

// How many bytes a client sends before gRPC gets the connection, as far as its first ones, `start`,
// tell. With TLS, gRPC itself limits the time of the handshake.
size_t BytesBeforeHandOver(absl::string_view start, bool tls) {
  if (tls || !absl::StartsWith(start, kPreface)) return kPreface.size();
  if (start.size() < kPreface.size() + kFrameHeader) return kPreface.size() + kFrameHeader;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(start[kPreface.size() + i]); };
  return kPreface.size() + kFrameHeader + (size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2));
}

void Watch(int epoll, int operation, int socket, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = socket;
  epoll_ctl(epoll, operation, socket, &event);
}

}  // namespace

AcceptLoop::AcceptLoop(const Options& options, std::vector<Listener> listeners,
                       ConnectionCount* count, ClientConnections* by_client, Metrics* metrics,
                       const Clock* clock)
    : options_(options),
      listeners_(std::move(listeners)),
      count_(count),
      by_client_(by_client),
      metrics_(metrics),
      clock_(clock),
      timer_(clock->NewTimer()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  Watch(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), EPOLLIN);
  Watch(epoll_.get(), EPOLL_CTL_ADD, timer_->fd(), EPOLLIN);
  for (const Listener& listener : listeners_) {
    listener_of_[listener.socket.get()] = &listener;
    Watch(epoll_.get(), EPOLL_CTL_ADD, listener.socket.get(), EPOLLIN);
  }
  thread_ = std::thread([this] { Loop(); });
}

AcceptLoop::~AcceptLoop() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
  MutexLock lock(&mutex_);
  // What clients keep sending could occupy the threads for ever.
  if (serving_ > 0) {
    for (const auto& [socket, connection] : connections_) shutdown(socket, SHUT_RDWR);
  }
  while (serving_ > 0) served_.Wait(&mutex_);
}

void AcceptLoop::Loop() {
  std::array<epoll_event, 256> events;
  while (true) {
    timer_->Set(NextLook());
    const int ready = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    std::vector<const Listener*> with_clients;
    for (int i = 0; i < ready; ++i) {
      const int socket = events[i].data.fd;
      if (socket == stop_.get()) return;
      const auto listener = listener_of_.find(socket);
      if (listener == listener_of_.end()) {
        OnEvent(socket, events[i].events);
      } else {
        with_clients.push_back(listener->second);
      }
    }
    CloseExpired();
    CutFloods();
    // Last: it closes and opens sockets, and the events above name them by number.
    for (const Listener* listener : with_clients) AcceptAll(*listener);
  }
}

TimePoint AcceptLoop::NextLook() const {
  if (connections_.empty()) return kNoDeadline;
  if (silent_.empty()) return next_flood_check_;
  return std::min(next_flood_check_, connections_.at(silent_.front()).deadline);
}

void AcceptLoop::AcceptAll(const Listener& listener) {
  const auto admit = [&](FileDescriptor socket, const SocketAddress& peer) {
    Admit(listener, std::move(socket), peer);
  };
  const auto no_files = [this] { metrics_->CountRefusedConnection(RefusedConnection::kNoFiles); };
  if (acceptor_.AcceptAll(listener.socket.get(), admit, no_files)) return;
  Watch(epoll_.get(), EPOLL_CTL_DEL, listener.socket.get(), 0);
  if (options_.on_dead) options_.on_dead(listener.address);
}

void AcceptLoop::Admit(const Listener& listener, FileDescriptor socket, const SocketAddress& peer) {
  std::string host = ConnectionHost(socket.get(), peer);
  if (!MakeRoom(host)) return;
  const int number = socket.get();
  ++per_host_[host];
  Connection& connection = connections_[number];
  connection.socket = std::move(socket);
  connection.peer.address = PeerAddress(peer);
  if (!listener.tls) connection.peer.user = users_.UserOf(number, peer);
  connection.host = std::move(host);
  connection.listener = &listener;
  connection.deadline = clock_->Now() + options_.first_bytes_within;
  connection.waiting = silent_.insert(silent_.end(), number);
  count_->SetGrpc(connections_.size());
  // Edge-triggered: bytes that are not enough stay in the socket.
  Watch(epoll_.get(), EPOLL_CTL_ADD, number, EPOLLIN | EPOLLRDHUP | EPOLLET);
}

bool AcceptLoop::MakeRoom(const std::string& host) {
  const auto of_host = per_host_.find(host);
  if (of_host != per_host_.end() && of_host->second >= options_.max_connections_per_host &&
      !CloseOldestSilent(&host)) {
    metrics_->CountRefusedConnection(RefusedConnection::kMaxConnectionsPerHost);
    return false;
  }
  if (count_->Full() && !CloseOldestSilent(nullptr)) {
    metrics_->CountRefusedConnection(RefusedConnection::kMaxConnections);
    return false;
  }
  return true;
}

bool AcceptLoop::CloseOldestSilent(const std::string* host) {
  const auto oldest = std::find_if(silent_.begin(), silent_.end(), [&](int socket) {
    return host == nullptr || connections_.at(socket).host == *host;
  });
  if (oldest == silent_.end()) return false;
  metrics_->CountRefusedConnection(RefusedConnection::kSilent);
  Close(*oldest);
  return true;
}

void AcceptLoop::OnEvent(int socket, uint32_t events) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  if ((events & EPOLLHUP) != 0) return Close(socket);
  if (connection.waiting == silent_.end()) return;
  char first[kPreface.size() + kFrameHeader];
  const ssize_t bytes = recv(socket, first, sizeof(first), MSG_PEEK | MSG_DONTWAIT);
  if (bytes > 0) {
    const absl::string_view start(first, static_cast<size_t>(bytes));
    int readable = 0;
    ioctl(socket, FIONREAD, &readable);
    const size_t wanted = BytesBeforeHandOver(start, connection.listener->tls);
    if (static_cast<size_t>(readable) >= wanted) return HandOver(&connection);
  }
  const bool ended = (events & EPOLLRDHUP) != 0 || bytes == 0 || (bytes < 0 && errno != EAGAIN);
  if (ended) Close(socket);
}

void AcceptLoop::HandOver(Connection* connection) {
  FileDescriptor second(fcntl(connection->socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!second.valid()) {
    metrics_->CountRefusedConnection(RefusedConnection::kNoFiles);
    return Close(connection->socket.get());
  }
  silent_.erase(connection->waiting);
  connection->waiting = silent_.end();
  connection->name =
      connection->listener->tls ? connection->peer.address : DescriptorName(second.get());
  connection->number = by_client_->Open(connection->name, connection->peer);
  // From now on only its end, which epoll always reports.
  Watch(epoll_.get(), EPOLL_CTL_MOD, connection->socket.get(), EPOLLET);
  StartServing(connection->listener->serve, std::move(second));
}

void AcceptLoop::StartServing(const Serve& serve, FileDescriptor connection) {
  {
    MutexLock lock(&mutex_);
    ++serving_;
  }
  std::thread([this, &serve, connection = std::move(connection)]() mutable {
    serve(std::move(connection));
    MutexLock lock(&mutex_);
    --serving_;
    served_.NotifyAll();
  }).detach();
}

void AcceptLoop::CloseExpired() {
  const TimePoint now = clock_->Now();
  while (!silent_.empty() && connections_.at(silent_.front()).deadline <= now) {
    metrics_->CountRefusedConnection(RefusedConnection::kSilent);
    Close(silent_.front());
  }
}

void AcceptLoop::CutFloods() {
  const TimePoint now = clock_->Now();
  if (now < next_flood_check_) return;
  next_flood_check_ = now + kFloodCheckInterval;
  uint64_t of_all = 0;
  Connection* largest = nullptr;
  for (auto& [socket, connection] : connections_) {
    const auto bytes = ReadTcpBytes(socket);
    if (!bytes.has_value() || connection.waiting != silent_.end()) continue;
    if (bytes->sent != connection.when_last_sent.sent) connection.when_last_sent = *bytes;
    connection.unanswered_bytes = bytes->received - connection.when_last_sent.received;
    if (connection.unanswered_bytes > options_.max_unanswered_bytes) {
      Cut(&connection);
      continue;
    }
    of_all += connection.unanswered_bytes;
    if (largest == nullptr || connection.unanswered_bytes > largest->unanswered_bytes) {
      largest = &connection;
    }
  }
  if (of_all > options_.max_unanswered_bytes_of_all) Cut(largest);
}

// gRPC sees the end of the connection, and closes it.
void AcceptLoop::Cut(Connection* connection) {
  static LogLimiter limiter(1);
  if (const auto pass = limiter.Admit()) {
    LogWarning("connection cut off: a flood that HTTP/2 flow control does not hold back",
               {{"host", connection->host},
                {"bytes", connection->unanswered_bytes},
                {"suppressed", pass.suppressed}});
  }
  metrics_->CountRefusedConnection(RefusedConnection::kFlood);
  shutdown(connection->socket.get(), SHUT_RDWR);
  connection->when_last_sent.received += connection->unanswered_bytes;
  connection->unanswered_bytes = 0;
}

void AcceptLoop::Close(int socket) {
  const auto found = connections_.find(socket);
  Connection& connection = found->second;
  if (connection.waiting != silent_.end()) silent_.erase(connection.waiting);
  by_client_->Close(connection.name, connection.number);
  const auto of_host = per_host_.find(connection.host);
  if (--of_host->second == 0) per_host_.erase(of_host);
  // gRPC may have its descriptor of this socket for a moment longer. Until then epoll would report
  // it by our number, which the next connection may get.
  Watch(epoll_.get(), EPOLL_CTL_DEL, socket, 0);
  connections_.erase(found);
  count_->SetGrpc(connections_.size());
}

}  // namespace flashcore::server
