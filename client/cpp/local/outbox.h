// What goes out over a local socket. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_OUTBOX_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_OUTBOX_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/socket.h"

namespace flashcore::client::local {

// Sends frames whole and in order, and lets no caller wait: what the socket does not take at once,
// a thread sends later. Thread-safe.
class Outbox {
 public:
  // Of a frame that was not begun by its deadline, and is not sent. Runs on the outbox's thread.
  using Expired = std::function<void(uint64_t id)>;

  // `socket` outlives the outbox.
  Outbox(FrameSocket* socket, Expired expired);
  // The socket has been shut down. Drops what is left.
  ~Outbox();

  // Sends `message` as one frame, with `fd` unless it is -1. RESOURCE_EXHAUSTED if it is too large,
  // UNAVAILABLE if the socket has ended. The caller may close `fd` afterwards.
  absl::Status Send(uint64_t id, absl::string_view message, int fd, absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    uint64_t id;
    std::string frame;
    size_t sent;
    UniqueFd fd;
    absl::Time deadline;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Sends until the socket takes no more. False if it has ended.
  bool SendSome() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeExpired(std::vector<uint64_t>* expired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  FrameSocket* const socket_;
  const Expired expired_;
  absl::Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);  // from the first entry on
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_OUTBOX_H_
