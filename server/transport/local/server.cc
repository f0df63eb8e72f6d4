#include "server/transport/local/server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "server/telemetry/log.h"
#include "server/transport/connection_count.h"

namespace flashcore::server::local {
namespace {

// How often it looks for connections that are silent or do not read.
constexpr std::chrono::milliseconds kCheckInterval(100);

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

JobThread::~JobThread() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void JobThread::Add(Job job) {
  MutexLock lock(&mutex_);
  jobs_.push_back(std::move(job));
  changed_.NotifyAll();
}

void JobThread::Run() {
  while (true) {
    Job job;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && jobs_.empty()) changed_.Wait(&mutex_);
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& options,
                                                      AttentionMethods* methods) {
  absl::StatusOr<FileDescriptor> listening = ListenUnix(options.path);
  if (!listening.ok()) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on local:", options.path, ": ", listening.status().message()));
  }
  return absl::WrapUnique(new Server(options, methods, *std::move(listening)));
}

Server::Server(const Options& options, AttentionMethods* methods, FileDescriptor listening)
    : options_(options),
      listening_(std::move(listening)),
      clock_(methods->context()->clock),
      timer_(clock_->NewTimer()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      poller_(
          std::make_unique<RingPoller>(IdleSpin(*methods->fleet()), &methods->fleet()->clock())) {
  context_.methods = methods;
  context_.connections = &methods->context()->connections;
  context_.poller = poller_.get();
  context_.post = [this](std::weak_ptr<Connection> connection, Context::OnConnection action) {
    Post(std::move(connection), std::move(action));
  };
  context_.run_slow = [this](JobThread::Job job) { slow_.Add(std::move(job)); };
  context_.attend = context_.Rpc("Attend");
  context_.load_sequence = context_.Rpc("LoadSequence");
  unary_ = std::make_unique<UnaryCalls>(&context_);
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
  poller_.reset();  // it has sessions; requests in the engine have theirs
  context_.uses.WaitForNone();
}

void Server::Post(std::weak_ptr<Connection> connection, Context::OnConnection action) {
  {
    MutexLock lock(&mutex_);
    if (closed_) return;  // `action` may keep a call: drop it
    posted_.emplace_back(std::move(connection), std::move(action));
  }
  eventfd_write(wake_.get(), 1);
}

void Server::RunPosted() {
  std::vector<Posted> posted;
  {
    MutexLock lock(&mutex_);
    posted.swap(posted_);
  }
  for (auto& [weak, action] : posted) {
    const std::shared_ptr<Connection> connection = weak.lock();
    if (connection == nullptr) continue;
    action(connection.get());
    connection->Advance();
    Update(connection.get());
  }
}

void Server::Run() {
  std::array<epoll_event, 256> events;
  while (!stop_) {
    timer_->Set(NextCheck());
    const int ready = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    bool has_clients = false;
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      has_clients = has_clients || fd == listening_.get();
      const auto found = connections_.find(fd);
      if (found == connections_.end()) continue;
      const std::shared_ptr<Connection> connection = found->second.connection;
      connection->OnEvents(events[i].events);
      Update(connection.get());
    }
    RunPosted();
    CheckTimes();
    // Last: it opens sockets, and the events above name them by number.
    if (has_clients) AcceptAll();
  }
  connections_.clear();
  {
    MutexLock lock(&mutex_);
    closed_ = true;
  }
  RunPosted();  // drops what is for connections that have ended
  context_.connections->SetLocal(0);
}

TimePoint Server::NextCheck() const {
  const bool some = std::any_of(connections_.begin(), connections_.end(), [](const auto& entry) {
    return entry.second.connection->HasDeadline();
  });
  return some ? next_check_ : kNoDeadline;
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
  std::string user = ConnectionHost(socket.get(), peer);
  const auto of_user = per_user_.find(user);
  if (of_user != per_user_.end() && of_user->second >= options_.max_connections_per_user) {
    return Refuse(RefusedLocalConnection::kMaxConnectionsPerUser);
  }
  if (context_.connections->Full()) {
    return Refuse(RefusedLocalConnection::kMaxConnections);
  }
  const int fd = socket.get();
  auto connection = std::make_shared<Connection>(&context_, unary_.get(), options_,
                                                 std::move(socket), clock_->Now());
  ++per_user_[user];
  const uint32_t wanted = connection->events();
  connections_[fd] = {std::move(connection), std::move(user), wanted};
  Watch(epoll_.get(), EPOLL_CTL_ADD, fd, wanted);
  context_.connections->SetLocal(connections_.size());
}

void Server::Update(Connection* connection) {
  const auto found = connections_.find(connection->fd());
  if (found == connections_.end() || found->second.connection.get() != connection) return;
  Entry& entry = found->second;
  if (!connection->ended()) {
    const uint32_t wanted = connection->events();
    if (wanted == entry.events) return;
    entry.events = wanted;
    return Watch(epoll_.get(), EPOLL_CTL_MOD, connection->fd(), wanted);
  }
  const auto of_user = per_user_.find(entry.user);
  if (--of_user->second == 0) per_user_.erase(of_user);
  Watch(epoll_.get(), EPOLL_CTL_DEL, connection->fd(), 0);
  connections_.erase(found);
  context_.connections->SetLocal(connections_.size());
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
