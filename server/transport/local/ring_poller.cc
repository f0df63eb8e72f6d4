#include "server/transport/local/ring_poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace flashcore::server::local {
namespace {

// How often a spinning thread lets others run.
constexpr int kPassesBetweenYields = 16;

}  // namespace

RingPoller::RingPoller(Nanoseconds spin, const Clock* clock)
    : spin_(spin),
      clock_(clock),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  AddDoorbell(wake_.get());
  thread_ = std::thread([this] { Run(); });
}

RingPoller::~RingPoller() {
  Post([this] { stop_ = true; });
  thread_.join();
}

void RingPoller::Add(std::shared_ptr<Session> session) {
  Post([this, session = std::move(session)] { sessions_.push_back(session); });
}

void RingPoller::Remove(const std::shared_ptr<Session>& session) {
  Post([this, session] {
    sessions_.erase(std::remove(sessions_.begin(), sessions_.end(), session), sessions_.end());
  });
}

void RingPoller::Cancel(std::shared_ptr<Session> session, uint64_t tag) {
  Post([session = std::move(session), tag] {
    // The request may still be in its slot: takes what is there, within a limit.
    constexpr int kMostPolls = 512;
    for (int i = 0; i < kMostPolls && session->Poll(); ++i) {
    }
    session->Cancel(tag);
  });
}

bool RingPoller::AddDoorbell(int eventfd) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, eventfd, &event) == 0;
}

void RingPoller::RemoveDoorbell(int eventfd) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, eventfd, nullptr);
}

void RingPoller::Post(std::function<void()> command) {
  {
    MutexLock lock(&mutex_);
    commands_.push_back(std::move(command));
    has_commands_ = true;
  }
  eventfd_write(wake_.get(), 1);
}

void RingPoller::RunCommands() {
  if (!has_commands_.load(std::memory_order_acquire)) return;
  std::vector<std::function<void()>> commands;
  {
    MutexLock lock(&mutex_);
    commands.swap(commands_);
    has_commands_ = false;
  }
  for (const auto& command : commands) command();
}

bool RingPoller::PollAll() {
  bool worked = false;
  for (const auto& session : sessions_) worked |= session->Poll();
  return worked;
}

void RingPoller::Run() {
  TimePoint last_work = clock_->Now();
  int passes = 0;
  while (!stop_) {
    RunCommands();
    if (PollAll()) {
      last_work = clock_->Now();
    } else if (spin_ == Nanoseconds(0) || sessions_.empty() || clock_->Now() - last_work >= spin_) {
      Sleep();
      last_work = clock_->Now();
    } else if (++passes % kPassesBetweenYields == 0) {
      std::this_thread::yield();
    }
  }
}

void RingPoller::Sleep() {
  bool has_news = has_commands_ || stop_;
  for (const auto& session : sessions_) session->SetServerSleeps(true);
  for (const auto& session : sessions_) has_news = has_news || session->HasNews();
  if (!has_news) {
    std::array<epoll_event, 64> events;
    epoll_wait(epoll_.get(), events.data(), events.size(), -1);
  }
  for (const auto& session : sessions_) session->SetServerSleeps(false);
}

}  // namespace flashcore::server::local
