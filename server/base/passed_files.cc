#include "server/base/passed_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <limits>
#include <utility>

namespace flashcore::server {
namespace {

// Nobody else in the process uses it; glibc keeps the first ones for itself.
int WakeSignal() { return SIGRTMIN + 10; }

bool InstallHandler() {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  return sigaction(WakeSignal(), &action, nullptr) == 0;
}

// Signals the thread that makes it.
class ThreadTimer {
 public:
  ThreadTimer() {
    static const bool handled = InstallHandler();
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = WakeSignal();
    event._sigev_un._tid = gettid();
    made_ = handled && timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
    // Whoever started the process may have blocked it.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, WakeSignal());
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  }
  ~ThreadTimer() {
    if (made_) timer_delete(timer_);
  }
  ThreadTimer(const ThreadTimer&) = delete;
  ThreadTimer& operator=(const ThreadTimer&) = delete;

  // First `after`, which is less than a second, then every 0.1 ms. 0: no more.
  void Set(std::chrono::microseconds after) {
    if (!made_) return;
    const itimerspec times = {{0, 100'000}, {0, 1000 * after.count()}};
    timer_settime(timer_, 0, &times, nullptr);
  }

 private:
  timer_t timer_{};
  bool made_ = false;
};

ThreadTimer& TimerOfThread() {
  thread_local ThreadTimer timer;
  return timer;
}

// Whether the file is a memfd or a socket. Asks no file system.
bool IsPrompt(int file) {
  int type = 0;
  socklen_t size = sizeof(type);
  return fcntl(file, F_GET_SEALS) >= 0 || getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &size) == 0;
}

void CloseFile(FileDescriptor* file) {
  const linger none = {};
  setsockopt(file->get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
  file->reset();
}

void EmptyAndClose(FileDescriptor* socket) {
  std::array<char, 16384> buffer;
  while (recv(socket->get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
  }
  socket->reset();
}

}  // namespace

InterruptedWaits::InterruptedWaits(std::chrono::microseconds after) { TimerOfThread().Set(after); }

InterruptedWaits::~InterruptedWaits() {
  const int error = errno;
  TimerOfThread().Set(std::chrono::microseconds(0));
  errno = error;
}

void PassedFiles::Closer::Add(absl::string_view holder, FairJobs::Job close, size_t most) {
  bool is_too_many = false;
  {
    MutexLock lock(&mutex_);
    size_t& waiting = waiting_[std::string(holder)];
    is_too_many = waiting >= most;
    if (!is_too_many) ++waiting;
  }
  if (is_too_many) {
    const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
    return close();
  }
  jobs_.Add(holder, [this, name = std::string(holder), close = std::move(close)]() mutable {
    {
      const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
      close();
    }
    Done(name);
  });
}

void PassedFiles::Closer::Done(const std::string& holder) {
  MutexLock lock(&mutex_);
  const auto found = waiting_.find(holder);
  if (--found->second == 0) waiting_.erase(found);
}

size_t PassedFiles::Closer::waiting(absl::string_view holder) const {
  MutexLock lock(&mutex_);
  const auto found = waiting_.find(holder);
  return found == waiting_.end() ? 0 : found->second;
}

void PassedFiles::Close(absl::string_view holder, FileDescriptor file) {
  const bool is_prompt = IsPrompt(file.get());
  auto close = [file = std::move(file)]() mutable { CloseFile(&file); };
  if (is_prompt) return prompt_.Add(holder, std::move(close), kMaxWaiting);
  others_.Add(holder, std::move(close), std::numeric_limits<size_t>::max());
}

void PassedFiles::CloseConnection(absl::string_view holder, FileDescriptor socket) {
  shutdown(socket.get(), SHUT_RDWR);
  prompt_.Add(
      holder, [socket = std::move(socket)]() mutable { EmptyAndClose(&socket); }, kMaxWaiting);
}

bool PassedFiles::HasRoom(absl::string_view holder) const {
  return others_.waiting(holder) < kMaxOthers;
}

}  // namespace flashcore::server
