#include "server/transport/grpc/guard/accept_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/interrupted_waits.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// The first bytes of every HTTP/2 client: this, and a SETTINGS frame, whose header is its length in
// 3 bytes, its type, flags and the number of a stream. A TLS ClientHello is longer than the
// preface.
constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kFrameHeader = 9;

constexpr std::chrono::milliseconds kCountInterval(50);  // of calls and resets
// In an interval, so many calls count as ended, of all connections with many together: gRPC ends
// some without a word.
constexpr uint64_t kForgivenCalls = 100;
constexpr uint64_t kIntervalsOfAllResets = 10;  // until all of Options::resets are forgiven

// How many bytes a client sends before gRPC gets the connection, as far as its first ones, `start`,
// tell. With TLS, gRPC itself limits the time of the handshake.
size_t BytesBeforeHandOver(absl::string_view start, bool tls) {
  if (tls || !absl::StartsWith(start, kPreface)) return kPreface.size();
  if (start.size() < kPreface.size() + kFrameHeader) return kPreface.size() + kFrameHeader;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(start[kPreface.size() + i]); };
  return kPreface.size() + kFrameHeader + (size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2));
}

// Half of the files may be gRPC's, less some for those that are not connections.
int FirstDescriptor(int wanted) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  return static_cast<int>(std::min<rlim_t>(static_cast<rlim_t>(wanted), limit.rlim_cur / 2 + 128));
}

void Watch(int epoll, int operation, int socket, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = socket;
  epoll_ctl(epoll, operation, socket, &event);
}

}  // namespace

AcceptLoop::AcceptLoop(const Options& options, std::vector<Listener> listeners,
                       ClientConnections* by_client, PassedFiles* passed_files, Metrics* metrics,
                       const Clock* clock)
    : options_(options),
      listeners_(std::move(listeners)),
      by_client_(by_client),
      passed_files_(passed_files),
      metrics_(metrics),
      clock_(clock),
      timer_(clock->NewTimer()),
      first_descriptor_(FirstDescriptor(options.first_descriptor)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      tcp_(options.connections),
      unix_(options.connections) {
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
  for (auto& [socket, connection] : connections_) {
    shutdown(socket, SHUT_RDWR);
    Drop(*connection.door, connection.client->name, std::move(connection.socket));
  }
  const InterruptedWaits interrupted;  // by files of clients that were not accepted
  listeners_.clear();
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
    CountCalls();
    // Last: it closes and opens sockets, and the events above name them by number.
    for (const Listener* listener : with_clients) AcceptAll(*listener);
  }
}

TimePoint AcceptLoop::NextLook() const {
  if (connections_.empty()) return kNoDeadline;
  if (silent_.empty()) return next_count_;
  return std::min(next_count_, DeadlineOf(connections_.at(silent_.front())));
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
  const int number = socket.get();
  const std::optional<uid_t> user = users_.UserOf(number, peer);
  Door& door = peer.family() == AF_UNIX ? unix_ : tcp_;
  const std::string name = ConnectionClient(peer, user);
  const TimePoint now = clock_->Now();
  const bool of_proxy = options_.is_proxy && options_.is_proxy({PeerAddress(peer), user});
  if (!of_proxy && door.IsBanned(name, now)) {
    metrics_->CountRefusedConnection(RefusedConnection::kBanned);
    return Drop(door, name, std::move(socket));
  }
  Door::Client* client = door.Enter(name);
  if (!MakeRoom(door, *client)) {
    door.Leave(client);
    return Drop(door, name, std::move(socket));
  }
  Connection& connection = connections_[number];
  connection.socket = std::move(socket);
  connection.peer.address = PeerAddress(peer);
  if (!listener.tls) connection.peer.user = user;
  connection.door = &door;
  connection.client = client;
  connection.of_proxy = of_proxy;
  connection.listener = &listener;
  connection.began = now;
  connection.waiting = silent_.insert(silent_.end(), number);
  metrics_->connections.Set(static_cast<double>(connections_.size()));
  // Edge-triggered: bytes that are not enough stay in the socket.
  Watch(epoll_.get(), EPOLL_CTL_ADD, number, EPOLLIN | EPOLLRDHUP | EPOLLET);
}

bool AcceptLoop::MakeRoom(const Door& door, const Door::Client& client) {
  while (door.IsCrowded()) {
    const TimePoint now = clock_->Now();
    std::vector<Door::Connection> open;
    for (const auto& [socket, connection] : connections_) {
      if (connection.door == &door) open.push_back(AtDoor(connection, now));
    }
    const Door::Connection* gives = door.WhoMakesRoom(open, client);
    if (gives == nullptr) {
      metrics_->CountRefusedConnection(door.IsOverShare(client)
                                           ? RefusedConnection::kMaxConnectionsPerHost
                                           : RefusedConnection::kMaxConnections);
      return false;
    }
    const bool silent = gives->state == Door::State::kSilent;
    // It may have begun while this thread was busy with others.
    if (silent && HandOverIfBegun(&connections_.at(gives->socket))) continue;
    metrics_->CountRefusedConnection(silent ? RefusedConnection::kSilent
                                            : RefusedConnection::kMadeRoom);
    // If gRPC has the connection, it sees the end, and closes its descriptor.
    shutdown(gives->socket, SHUT_RDWR);
    Close(gives->socket);
  }
  return true;
}

Door::Connection AcceptLoop::AtDoor(const Connection& connection, TimePoint now) const {
  Door::Connection at_door = {connection.socket.get(), connection.client, Door::State::kSilent,
                              connection.began};
  if (connection.calls != nullptr) {
    const uint64_t finished = connection.calls->finished();
    at_door.last_use = std::max(connection.began, connection.calls->last_end());
    at_door.state = Door::StateOf(connection.calls->started() != finished, at_door.last_use, now);
  }
  return at_door;
}

void AcceptLoop::OnEvent(int socket, uint32_t events) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  if (connection.inflow != nullptr && (events & EPOLLRDHUP) != 0) connection.inflow->HangUp();
  if ((events & EPOLLHUP) != 0) return Close(socket);
  if (connection.inflow != nullptr) return;
  if (HandOverIfBegun(&connection)) return;
  char next = 0;
  const ssize_t bytes = recv(socket, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  const bool ended = (events & EPOLLRDHUP) != 0 || bytes == 0 || (bytes < 0 && errno != EAGAIN);
  if (ended) Close(socket);
}

bool AcceptLoop::HandOverIfBegun(Connection* connection) {
  const int socket = connection->socket.get();
  char first[kPreface.size() + kFrameHeader];
  const ssize_t bytes = recv(socket, first, sizeof(first), MSG_PEEK | MSG_DONTWAIT);
  if (bytes <= 0) return false;
  const absl::string_view start(first, static_cast<size_t>(bytes));
  int readable = 0;
  ioctl(socket, FIONREAD, &readable);
  if (static_cast<size_t>(readable) < BytesBeforeHandOver(start, connection->listener->tls)) {
    return false;
  }
  HandOver(connection);
  return true;
}

void AcceptLoop::HandOver(Connection* connection) {
  FileDescriptor second(fcntl(connection->socket.get(), F_DUPFD_CLOEXEC, first_descriptor_));
  Inflow* const inflow = Inflow::Of(second.get());
  if (inflow == nullptr) {
    metrics_->CountRefusedConnection(RefusedConnection::kNoFiles);
    return Close(connection->socket.get());
  }
  // If gRPC has closed a descriptor of this number, that connection has ended, though epoll may not
  // have said so yet. Whether it was cut off is known until the next Begin.
  const auto ended = std::find_if(connections_.begin(), connections_.end(),
                                  [&](const auto& other) { return other.second.inflow == inflow; });
  if (ended != connections_.end()) Close(ended->first);
  connection->inflow = inflow;
  connection->counts_for = ClientOf(*connection);
  silent_.erase(connection->waiting);
  connection->waiting = silent_.end();
  const std::string name =
      connection->listener->tls ? connection->peer.address : DescriptorName(second.get());
  connection->calls = by_client_->Open(name, connection->peer);
  connection->began = clock_->Now();
  // From now on only its end, which epoll always reports.
  Watch(epoll_.get(), EPOLL_CTL_MOD, connection->socket.get(), EPOLLRDHUP | EPOLLET);
  connection->inflow->Begin(second.get(), connection->listener->tls, connection->calls,
                            connection->counts_for->inflow, options_.inflow);
  ended_.erase(std::remove(ended_.begin(), ended_.end(), connection->inflow), ended_.end());
  const InflowOfThread of_thread(inflow);
  connection->listener->serve(std::move(second));
}

void AcceptLoop::CloseExpired() {
  const TimePoint now = clock_->Now();
  while (!silent_.empty() && DeadlineOf(connections_.at(silent_.front())) <= now) {
    metrics_->CountRefusedConnection(RefusedConnection::kSilent);
    Close(silent_.front());
  }
}

void AcceptLoop::CountCalls() {
  const TimePoint now = clock_->Now();
  if (now < next_count_) return;
  const auto intervals = static_cast<uint64_t>((now - last_count_) / kCountInterval);
  last_count_ = now;
  next_count_ = now + kCountInterval;
  for (auto found = clients_.begin(); found != clients_.end();) {
    Client& client = found->second;
    BanWhoFlooded(&client);  // on connections that it has closed meanwhile
    client.inflow->ForgiveResets(intervals * options_.resets / kIntervalsOfAllResets);
    const bool is_done = client.inflow.use_count() == 1 && client.inflow->resets() == 0;
    found = is_done ? clients_.erase(found) : std::next(found);
  }
  uint64_t excess = 0;
  std::vector<Inflow*> with_many;
  for (const auto& [socket, connection] : connections_) {
    if (connection.calls != nullptr && connection.calls->broken()) shutdown(socket, SHUT_RDWR);
    if (connection.inflow == nullptr) continue;
    const uint64_t of_one = connection.inflow->excess();
    excess += of_one;
    if (of_one > 0) with_many.push_back(connection.inflow);
  }
  const auto ended = [](const Inflow* inflow) { return inflow->calls() == 0; };
  ended_.erase(std::remove_if(ended_.begin(), ended_.end(), ended), ended_.end());
  for (Inflow* inflow : ended_) {
    excess += inflow->calls();
    with_many.push_back(inflow);
  }
  Inflow::SetExcessOfAll(excess);
  for (Inflow* inflow : with_many) {
    inflow->ForgiveCalls(std::max<uint64_t>(1, kForgivenCalls / with_many.size()));
  }
}

AcceptLoop::Client* AcceptLoop::ClientOf(const Connection& connection) {
  const std::string& name = connection.client->name;
  std::string key = absl::StrCat(connection.door == &unix_ ? "unix " : "tcp ", name);
  if (connection.of_proxy) absl::StrAppend(&key, " ", ++proxy_connections_);
  Client& client = clients_[key];
  if (client.inflow == nullptr) {
    client = {connection.door, name, connection.of_proxy,
              std::make_shared<ClientInflow>(options_.resets)};
  }
  return &client;
}

void AcceptLoop::BanWhoFlooded(Client* client) {
  uint64_t cut_offs = client->inflow->TakeCutOffs();
  if (cut_offs == 0) return;
  static LogLimiter limiter(1);
  if (const auto pass = limiter.Admit()) {
    LogWarning("connection cut off: a flood of streams, headers or frames, or a passed file",
               {{"host", client->name}, {"suppressed", pass.suppressed}});
  }
  for (; cut_offs > 0; --cut_offs) metrics_->CountRefusedConnection(RefusedConnection::kFlood);
  if (!client->of_proxy) client->door->Ban(client->name, clock_->Now());
}

void AcceptLoop::Close(int socket) {
  const auto found = connections_.find(socket);
  Connection& connection = found->second;
  if (connection.waiting != silent_.end()) silent_.erase(connection.waiting);
  if (connection.calls != nullptr) {
    by_client_->Close(*connection.calls);
    BanWhoFlooded(connection.counts_for);
    ended_.push_back(connection.inflow);
  }
  // gRPC may have its descriptor of this socket for a moment longer. Until then epoll would report
  // it by our number, which the next connection may get.
  Watch(epoll_.get(), EPOLL_CTL_DEL, socket, 0);
  Drop(*connection.door, connection.client->name, std::move(connection.socket));
  connection.door->Leave(connection.client);
  connections_.erase(found);
  metrics_->connections.Set(static_cast<double>(connections_.size()));
}

void AcceptLoop::Drop(const Door& door, const std::string& client, FileDescriptor socket) {
  if (&door == &unix_) passed_files_->CloseConnection(client, std::move(socket));
}

}  // namespace flashcore::server
