#include "client/cpp/local/outbox.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client::local {
namespace {

// How often the thread looks for expired frames while the server does not read.
constexpr absl::Duration kTick = absl::Milliseconds(20);

}  // namespace

Outbox::Outbox(FrameSocket* socket, Expired expired)
    : socket_(socket), expired_(std::move(expired)) {}

Outbox::~Outbox() {
  std::thread thread;
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

absl::Status Outbox::Send(uint64_t id, absl::string_view message, int fd, absl::Time deadline) {
  absl::StatusOr<std::string> frame = FrameOf(message);
  if (!frame.ok()) return frame.status();
  absl::MutexLock lock(&mutex_);
  size_t sent = 0;
  if (entries_.empty()) {
    absl::Status status = socket_->TrySend(*frame, fd, &sent);
    if (!status.ok() || sent == frame->size()) return status;
  }
  UniqueFd later;
  if (fd >= 0 && sent == 0) {
    later = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (later.get() < 0) return absl::ResourceExhaustedError("the process may open too few files");
  }
  if (!thread_.joinable() && !stop_) {
    if (const int error = StartThread(&thread_, [this] { Run(); }); error != 0) {
      if (sent > 0) socket_->Shutdown();  // nobody sends the rest
      return absl::ResourceExhaustedError(NoThreadMessage(error));
    }
  }
  entries_.push_back({id, *std::move(frame), sent, std::move(later), deadline});
  return absl::OkStatus();
}

void Outbox::Run() {
  std::vector<uint64_t> expired;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      const auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stop_ || !entries_.empty();
      };
      mutex_.Await(absl::Condition(&wanted));
      if (stop_) return;
      if (!SendSome()) entries_.clear();  // the connection's reader sees the end, too
      TakeExpired(&expired);
    }
    for (const uint64_t id : expired) expired_(id);
    expired.clear();
    socket_->WaitWritable(kTick);
  }
}

bool Outbox::SendSome() {
  while (!entries_.empty()) {
    Entry& entry = entries_.front();
    if (!socket_->TrySend(entry.frame, entry.fd.get(), &entry.sent).ok()) return false;
    if (entry.sent < entry.frame.size()) return true;
    entries_.pop_front();
  }
  return true;
}

// Half a frame cannot be taken back.
void Outbox::TakeExpired(std::vector<uint64_t>* expired) {
  const absl::Time now = absl::Now();
  const auto is_late = [now](const Entry& entry) {
    return entry.sent == 0 && entry.deadline <= now;
  };
  for (const Entry& entry : entries_) {
    if (is_late(entry)) expired->push_back(entry.id);
  }
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_late), entries_.end());
}

}  // namespace flashcore::client::local
