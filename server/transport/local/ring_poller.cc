#include "server/transport/local/ring_poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <utility>
#include <vector>

namespace flashcore::server::local {
namespace {

// How often a spinning thread lets others run.
constexpr int kPassesBetweenYields = 16;

// Between two looks at counters that GPUs write.
constexpr timespec kNap = {0, 50'000};

}  // namespace

RingPoller::RingPoller(Nanoseconds spin, InputWaits* waits, const Clock* clock)
    : spin_(spin),
      waits_(waits),
      clock_(clock),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  AddDoorbell(wake_.get());
  waits_->SetWake([this] { Wake(); });
  thread_ = std::thread([this] { Run(); });
}

RingPoller::~RingPoller() {
  waits_->SetWake(nullptr);
  stop_ = true;
  Wake();
  thread_.join();
}

void RingPoller::Wake() { eventfd_write(wake_.get(), 1); }

void RingPoller::Add(std::shared_ptr<RingSession> session) {
  Post({std::move(session), /*add=*/true});
}

void RingPoller::Remove(const std::shared_ptr<RingSession>& session) {
  Post({session, /*add=*/false});
}

bool RingPoller::AddDoorbell(int eventfd) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, eventfd, &event) == 0;
}

void RingPoller::RemoveDoorbell(int eventfd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, eventfd, nullptr);
}

void RingPoller::Post(Command command) {
  {
    MutexLock lock(&mutex_);
    const std::string& client = command.session->client();
    commands_.Add(client, std::move(command));
    has_commands_ = true;
  }
  Wake();
}

void RingPoller::RunCommands() {
  if (!has_commands_.load(std::memory_order_acquire)) return;
  std::vector<Command> commands;  // one of each client
  {
    MutexLock lock(&mutex_);
    for (size_t left = commands_.clients(); left > 0; --left) commands.push_back(commands_.Take());
    has_commands_ = !commands_.empty();
  }
  for (Command& command : commands) {
    if (command.add) {
      turns_.Add(std::move(command.session));
    } else {
      turns_.Remove(command.session);
    }
  }
}

void RingPoller::Run() {
  TimePoint last_work = clock_->Now();
  int passes = 0;
  while (!stop_) {
    RunCommands();
    const bool taken = turns_.Poll();
    if (waits_->Poll() || taken) {
      last_work = clock_->Now();
    } else if (spin_ == Nanoseconds(0) || (turns_.empty() && waits_->empty()) ||
               clock_->Now() - last_work >= spin_) {
      if (Sleep()) last_work = clock_->Now();
    } else if (++passes % kPassesBetweenYields == 0) {
      std::this_thread::yield();
    }
  }
}

bool RingPoller::Sleep() {
  if (turns_.Sleep() || has_commands_ || stop_) return true;
  if (!waits_->empty()) {
    pollfd news = {epoll_.get(), POLLIN, 0};
    if (ppoll(&news, 1, &kNap, nullptr) <= 0) return false;
  }
  std::array<epoll_event, 64> events;
  epoll_wait(epoll_.get(), events.data(), events.size(), -1);
  return true;
}

}  // namespace flashcore::server::local
