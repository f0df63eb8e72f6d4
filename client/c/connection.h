// One connection of the local socket, for the C library. Internal to it.
#ifndef FLASHCORE_CLIENT_C_CONNECTION_H_
#define FLASHCORE_CLIENT_C_CONNECTION_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "client/c/status.h"

namespace flashcore::c {

using Clock = std::chrono::steady_clock;

// Owns a file descriptor; -1: none.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Of a LocalReply, whose status is OK.
struct Reply {
  std::string result;  // the field of `result`
  File file;           // that came with it, or none
};

// Thread-safe. A thread of its own reads replies, and sends what the socket did not take at once:
// so only Exchange waits, and for its reply alone.
class Connection {
 public:
  static Status Connect(const std::string& path, std::unique_ptr<Connection>* connection);
  // Ends it.
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Sends a LocalRequest with the message `action` in its field `field`, and waits for the reply.
  // `file` goes with it; -1: none. A call whose reply does not come by the deadline is cancelled.
  Status Exchange(uint32_t field, std::string_view action, int file, Clock::time_point deadline,
                  Reply* reply);
  // The same without waiting for a reply.
  void Tell(uint32_t field, std::string_view action);

  // Ends it with `status`, unless it has ended. Safe from any thread.
  void End(Status status);
  // True once it has ended; then `on_end` runs.
  const std::atomic<bool>& ended() const { return ended_; }
  Status end_status() const;
  // Runs when it ends, on any thread, or at once. Set once.
  void OnEnd(std::function<void()> on_end);

 private:
  struct Waiting {
    bool done = false;
    Status status;
    Reply reply;
  };
  struct Frame {
    std::string bytes;
    size_t sent;
    File file;
  };

  explicit Connection(File socket, File wake)
      : socket_(std::move(socket)), wake_(std::move(wake)) {}
  Status Send(uint64_t id, uint32_t field, std::string_view action, int file);
  bool SendSome();  // with mutex_; false: the socket has ended
  void Run();
  bool Receive(std::string* in, std::deque<File>* files);
  bool TakeFrames(std::string* in, std::deque<File>* files);
  void TakeReply(std::string_view message, std::deque<File>* files);

  const File socket_;
  const File wake_;  // an eventfd: the thread shall look at out_
  mutable std::mutex mutex_;
  std::condition_variable answered_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Waiting*> waiting_;  // by id
  std::deque<Frame> out_;
  Status end_status_;
  std::function<void()> on_end_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace flashcore::c

#endif  // FLASHCORE_CLIENT_C_CONNECTION_H_
