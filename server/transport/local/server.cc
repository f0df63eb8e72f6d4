#include "server/transport/local/server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/base/interrupted_waits.h"
#include "server/telemetry/log.h"

namespace flashcore::server::local {
namespace {

// How often it looks for connections that are silent or do not read.
constexpr std::chrono::milliseconds kCheckInterval(100);

// Actions that it runs before it looks at the sockets again.
constexpr size_t kPostedAtOnce = 16;

void Watch(int epoll, int operation, int fd, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = fd;
  epoll_ctl(epoll, operation, fd, &event);
}

// How long an idle lane spins, of the device where that is longest: rings are as hot as lanes. No
// spinning on the CPU device, whose kernels need the cores.
Nanoseconds IdleSpin(const Fleet& fleet) {
  Nanoseconds spin(0);
  for (const auto& engine : fleet.engines()) {
    spin = std::max(spin, engine->device().info().idle_spin);
  }
  return spin;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options,
                                                      AttentionMethods* methods,
                                                      PassedFiles* passed_files) {
  absl::StatusOr<FileDescriptor> listening = ListenUnix(options.path, options.access);
  if (!listening.ok()) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on local:", options.path, ": ", listening.status().message()));
  }
  return absl::WrapUnique(new Server(options, methods, passed_files, *std::move(listening)));
}

Server::Server(const Options& options, AttentionMethods* methods, PassedFiles* passed_files,
               FileDescriptor listening)
    : options_(options),
      listening_(std::move(listening)),
      metrics_(*methods->context()->metrics),
      clock_(methods->context()->clock),
      timer_(clock_->NewTimer()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      method_table_(methods),
      door_(options.connections),
      received_(options.received_bytes),
      room_(options.call_bytes),
      input_waits_(methods->fleet()->input_waits()),
      poller_(std::make_unique<RingPoller>(IdleSpin(*methods->fleet()), &input_waits_,
                                           &methods->fleet()->clock())) {
  services_.calls = {methods, &room_, &long_calls_, &uses_};
  services_.methods = &method_table_;
  services_.attend = {methods->fleet(), methods->context(), methods->Rpc("Attend", "local")};
  services_.passed_files = passed_files;
  services_.slow = &slow_;
  services_.poller = poller_.get();
  services_.post = [this](absl::string_view client, std::weak_ptr<Connection> connection,
                          Connection::Action action) {
    Post(client, std::move(connection), std::move(action));
  };
  Watch(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN | EPOLLET);
  Watch(epoll_.get(), EPOLL_CTL_ADD, timer_->fd(), EPOLLIN);
  Watch(epoll_.get(), EPOLL_CTL_ADD, listening_.get(), EPOLLIN);
  thread_ = std::thread([this] { Run(); });
}

Server::~Server() {
  unlink(options_.path.c_str());
  stop_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  {
    const InterruptedWaits interrupted;  // by files of clients that were not accepted
    listening_.reset();
  }
  input_waits_.EndAll(absl::UnavailableError(kDrains));
  poller_.reset();  // it has sessions; requests in the engine have theirs
  uses_.WaitForNone();
}

void Server::Post(absl::string_view client, std::weak_ptr<Connection> connection,
                  Connection::Action action) {
  bool wake = false;
  {
    MutexLock lock(&mutex_);
    if (closed_) return;  // `action` may keep a call: drop it
    wake = !awake_ && posted_.empty();
    posted_.Add(client, Posted(std::move(connection), std::move(action)));
  }
  if (wake) eventfd_write(wake_.get(), 1);
}

void Server::RunPosted() {
  std::vector<Posted> posted;
  bool has_more = false;
  {
    MutexLock lock(&mutex_);
    while (!posted_.empty() && posted.size() < kPostedAtOnce) posted.push_back(posted_.Take());
    has_more = !posted_.empty();
    awake_ = false;
  }
  if (has_more) eventfd_write(wake_.get(), 1);
  for (auto& [weak, action] : posted) {
    const std::shared_ptr<Connection> connection = weak.lock();
    if (connection == nullptr) continue;
    action(connection.get());
    Update(connection.get());
  }
}

bool Server::GiveTurn(Entry* entry) {
  if (entry->turn.has_value()) return false;
  entry->turn = turns_.Add(entry->client->name, entry);
  return true;
}

void Server::RunTurns() {
  for (size_t left = turns_.clients(); left > 0 && !turns_.empty(); --left) {
    Entry* const entry = turns_.Take();
    entry->turn.reset();
    const std::shared_ptr<Connection> connection = entry->connection;
    connection->OnEvents(std::exchange(entry->came, 0));
    Update(connection.get());
  }
}

void Server::Run() {
  std::array<epoll_event, 256> events;
  while (!stop_) {
    timer_->Set(NextCheck());
    const int ready =
        epoll_wait(epoll_.get(), events.data(), events.size(), turns_.empty() ? -1 : 0);
    {
      MutexLock lock(&mutex_);
      awake_ = true;
    }
    bool has_clients = false;
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      has_clients = has_clients || fd == listening_.get();
      const auto found = connections_.find(fd);
      if (found == connections_.end()) continue;
      found->second.came |= events[i].events;
      if (!GiveTurn(&found->second)) Want(&found->second, 0);
    }
    RunTurns();
    RunPosted();
    CheckTimes();
    // Last: it opens sockets, and the events above name them by number.
    if (has_clients) AcceptAll();
  }
  turns_ = {};
  connections_.clear();
  Turns<Posted> dropped;  // for connections that have ended
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    std::swap(dropped, posted_);
  }
  metrics_.local_connections.Set(0);
}

void Server::AcceptAll() {
  const auto admit = [this](FileDescriptor socket, const SocketAddress& /*peer*/) {
    Admit(std::move(socket));
  };
  const auto no_files = [this] { Refuse(RefusedLocalConnection::kNoFiles); };
  if (acceptor_.AcceptAll(listening_.get(), admit, no_files)) return;
  Watch(epoll_.get(), EPOLL_CTL_DEL, listening_.get(), 0);
  if (options_.on_dead) options_.on_dead("local:" + options_.path);
}

void Server::Admit(FileDescriptor socket) {
  SocketAddress peer;
  peer.storage.ss_family = AF_UNIX;
  const std::string name = ConnectionClient(peer, UnixPeerUser(socket.get()));
  Door::Client* client = door_.Enter(name);
  if (!MakeRoom(*client)) {
    services_.passed_files->CloseConnection(name, std::move(socket));
    return door_.Leave(client);
  }
  const int fd = socket.get();
  auto connection = std::make_shared<Connection>(&services_, options_.connection, std::move(socket),
                                                 name, clock_->Now());
  Entry& entry = connections_[fd];
  entry.connection = std::move(connection);
  entry.client = client;
  if (MustWait(entry)) {
    Refuse(RefusedLocalConnection::kBanned);
  } else {
    entry.events = entry.connection->events();
  }
  ++with_deadline_;
  Watch(epoll_.get(), EPOLL_CTL_ADD, fd, entry.events);
  metrics_.local_connections.Set(static_cast<double>(connections_.size()));
}

bool Server::MakeRoom(const Door::Client& client) {
  if (!door_.IsCrowded()) return true;
  const TimePoint now = clock_->Now();
  std::vector<Door::Connection> open;
  for (const auto& [fd, entry] : connections_) {
    const Connection& connection = *entry.connection;
    open.push_back({fd, entry.client, connection.StateAt(now), connection.last_use()});
  }
  const Door::Connection* gives = door_.WhoMakesRoom(open, client);
  if (gives == nullptr) {
    Refuse(door_.IsOverShare(client) ? RefusedLocalConnection::kMaxConnectionsPerUser
                                     : RefusedLocalConnection::kMaxConnections);
    return false;
  }
  Refuse(gives->state == Door::State::kSilent ? RefusedLocalConnection::kSilent
                                              : RefusedLocalConnection::kMadeRoom);
  const std::shared_ptr<Connection> connection = connections_.at(gives->socket).connection;
  connection->End();
  Update(connection.get());
  return true;
}

void Server::Want(Entry* entry, uint32_t events) {
  if (events == std::exchange(entry->events, events)) return;
  Watch(epoll_.get(), EPOLL_CTL_MOD, entry->connection->fd(), events);
}

void Server::Update(Connection* connection) {
  const auto found = connections_.find(connection->fd());
  if (found == connections_.end() || found->second.connection.get() != connection) return;
  Entry& entry = found->second;
  if (entry.has_deadline && (connection->ended() || !connection->HasDeadline())) {
    entry.has_deadline = false;
    --with_deadline_;
  }
  if (!connection->ended()) {
    if (connection->has_more()) GiveTurn(&entry);
    Want(&entry, entry.turn.has_value() || MustWait(entry) ? 0 : connection->events());
    Charge(&entry);
    return EndToFreeMemory();
  }
  // Otherwise it could come back at once, and keep this thread busy with files that are lost.
  if (connection->too_many_files()) door_.Ban(entry.client->name, clock_->Now());
  door_.Leave(entry.client);
  if (entry.turn.has_value()) turns_.Remove(*entry.turn);
  if (entry.received.client != nullptr) received_.Give(&entry.received);
  Watch(epoll_.get(), EPOLL_CTL_DEL, connection->fd(), 0);
  connections_.erase(found);
  metrics_.local_connections.Set(static_cast<double>(connections_.size()));
}

bool Server::MustWait(const Entry& entry) const {
  return entry.connection->HasDeadline() && door_.IsBanned(entry.client->name, clock_->Now());
}

void Server::Charge(Entry* entry) {
  const Connection& connection = *entry->connection;
  const std::string& client =
      connection.client().empty() ? entry->client->name : connection.client();
  Shares::Item* const item = &entry->received;
  const size_t bytes = connection.received_bytes();
  if (item->client != nullptr) {
    if (item->amount == bytes && item->client->name == client) return;
    received_.Give(item);
  }
  if (bytes > 0) received_.Take(client, bytes, item);
}

void Server::EndToFreeMemory() {
  while (const Shares::Client* const client = received_.MustGiveBack()) {
    const Shares::Item* most = client->oldest;
    for (const Shares::Item* item = most; item != nullptr; item = item->newer) {
      if (item->amount > most->amount) most = item;
    }
    const auto found = std::find_if(connections_.begin(), connections_.end(),
                                    [&](const auto& c) { return &c.second.received == most; });
    const std::shared_ptr<Connection> connection = found->second.connection;
    door_.Ban(found->second.client->name, clock_->Now());
    connection->Break(absl::ResourceExhaustedError(absl::StrCat(
                          "frames: those of this client that have not completely arrived take ",
                          client->held, " bytes; the limit is ", received_.limits().one,
                          " (a quarter of --transport_memory_bytes)")),
                      RefusedLocalConnection::kMemory);
    Update(connection.get());
  }
}

void Server::CheckTimes() {
  const TimePoint now = clock_->Now();
  if (now < next_check_) return;
  next_check_ = now + kCheckInterval;
  std::vector<std::shared_ptr<Connection>> all;
  for (const auto& [fd, entry] : connections_) {
    if (entry.connection->HasDeadline()) all.push_back(entry.connection);
  }
  for (const auto& connection : all) {
    connection->CheckTime(now);
    Update(connection.get());
  }
}

}  // namespace flashcore::server::local
