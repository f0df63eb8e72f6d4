#include "server/telemetry/log_writer.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace flashcore::server {
namespace {

constexpr std::chrono::milliseconds kFlushTime(200);
constexpr int kPollMs = 100;

// How much of `text` to write at once. A pipe that is ready takes PIPE_BUF bytes without blocking,
// and does not mix them with the output of other processes. Prefers whole records.
size_t ChunkBytes(absl::string_view text) {
  if (text.size() <= PIPE_BUF) return text.size();
  const size_t newline = text.rfind('\n', PIPE_BUF - 1);
  return newline == absl::string_view::npos ? PIPE_BUF : newline + 1;
}

}  // namespace

LogWriter::LogWriter(int fd, size_t queue_bytes,
                     std::function<std::string(uint64_t)> dropped_record)
    : fd_(fd), queue_bytes_(queue_bytes), dropped_record_(std::move(dropped_record)) {}

LogWriter::~LogWriter() {
  Flush(kFlushTime);
  stopping_ = true;
  {
    MutexLock lock(&mutex_);
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void LogWriter::Write(absl::string_view record) {
  MutexLock lock(&mutex_);
  if (record.size() > queue_bytes_ - queue_.size()) {
    ++dropped_;
    ++unreported_;
    return;
  }
  queue_.append(record.data(), record.size());
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  changed_.NotifyAll();
}

void LogWriter::Flush(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(&mutex_);
  while ((writing_ || !queue_.empty()) && changed_.WaitUntil(&mutex_, end)) {
  }
}

void LogWriter::Run() {
  // No signals on this thread. With SIGPIPE blocked, writing to a closed pipe returns EPIPE.
  sigset_t signals;
  sigfillset(&signals);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  Batch batch;
  while (Take(&batch)) {
    absl::string_view rest = batch.text;
    while (!rest.empty() && WaitUntilWritable()) {
      const ssize_t written = write(fd_, rest.data(), ChunkBytes(rest));
      if (written >= 0) {
        rest.remove_prefix(static_cast<size_t>(written));
      } else if (errno != EINTR && errno != EAGAIN) {
        break;
      }
    }
    CountLost(batch, rest);
  }
}

// Waits for records and moves them to `batch`. False when stopping.
bool LogWriter::Take(Batch* batch) {
  MutexLock lock(&mutex_);
  writing_ = false;
  changed_.NotifyAll();
  while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
  if (stopping_) return false;
  writing_ = true;
  batch->text = std::exchange(queue_, {});
  batch->reported = std::exchange(unreported_, 0);
  if (batch->reported > 0) batch->text += dropped_record_(batch->reported);
  return true;
}

// False when stopping. Also returns when writing would fail.
bool LogWriter::WaitUntilWritable() {
  pollfd poll_fd = {fd_, POLLOUT, 0};
  while (poll(&poll_fd, 1, kPollMs) == 0) {
    if (stopping_) return false;
  }
  return true;
}

void LogWriter::CountLost(const Batch& batch, absl::string_view unwritten) {
  if (unwritten.empty()) return;
  auto lost = static_cast<uint64_t>(std::count(unwritten.begin(), unwritten.end(), '\n'));
  if (batch.reported > 0) --lost;  // the report itself
  dropped_ += lost;
  MutexLock lock(&mutex_);
  unreported_ += lost + batch.reported;
}

}  // namespace flashcore::server
