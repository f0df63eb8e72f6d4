#include "server/base/periodic_thread.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

namespace flashcore::server {

PeriodicThread::PeriodicThread(const Clock* clock, Nanoseconds interval, std::function<void()> call)
    : clock_(clock),
      interval_(interval),
      call_(std::move(call)),
      timer_(clock->NewTimer()),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      soon_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  timer_->Set(clock_->Now() + interval_);
  thread_ = std::thread([this] { Loop(); });
}

PeriodicThread::~PeriodicThread() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

void PeriodicThread::CallSoon() { eventfd_write(soon_.get(), 1); }

void PeriodicThread::Loop() {
  while (WaitForNext()) {
    timer_->Set(clock_->Now() + interval_);
    call_();
  }
}

bool PeriodicThread::WaitForNext() const {
  pollfd files[] = {{stop_.get(), POLLIN, 0}, {timer_->fd(), POLLIN, 0}, {soon_.get(), POLLIN, 0}};
  while (poll(files, 3, -1) < 0 && errno == EINTR) {
  }
  eventfd_t ignored = 0;
  eventfd_read(soon_.get(), &ignored);
  return files[0].revents == 0;
}

}  // namespace flashcore::server
