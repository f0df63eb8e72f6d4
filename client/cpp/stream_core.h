// The interface of an AttendStream, whichever way its requests travel. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_STREAM_CORE_H_
#define FLASHCORE_CLIENT_CPP_STREAM_CORE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/encode.h"
#include "flashcore/attend_stream.h"

namespace flashcore::client {

// Keeps the requests in flight and the answers to receive; a transport derives from it. User
// callbacks never run under a mutex.
class StreamCore {
 public:
  using Callback = AttendStream::Callback;

  virtual ~StreamCore() = default;

  virtual absl::Status Send(const AttendRequest& request, Callback done) = 0;
  virtual absl::Status Finish() = 0;
  virtual void Cancel() = 0;

  absl::Status SendForReceive(const AttendRequest& request) ABSL_LOCKS_EXCLUDED(receive_mutex_);
  bool Receive(AttendStream::Answer* answer) ABSL_LOCKS_EXCLUDED(receive_mutex_);

 protected:
  struct Pending {
    Destination destination;  // of a transport that copies the answer itself
    size_t request_bytes = 0;
    absl::Time begin = absl::Now();
    Callback done;
    uint64_t ticket = 0;  // of a transport that has one
  };

  explicit StreamCore(const StreamOptions& options)
      : timeout_(options.timeout), max_inflight_(options.max_inflight) {}

  // Adds a request to pending_, or says why it cannot be sent.
  absl::Status Admit(const std::string& request_id, Pending pending)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes it again; without a callback if there is none.
  Pending TakePending(const std::string& request_id) ABSL_LOCKS_EXCLUDED(mutex_);

  const absl::Duration timeout_;  // of each request
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Pending> pending_ ABSL_GUARDED_BY(mutex_);  // by request_id
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;                             // Finish was called
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;                                // send no more
  bool done_ ABSL_GUARDED_BY(mutex_) = false;   // it has ended, with final_
  absl::Status final_ ABSL_GUARDED_BY(mutex_);  // valid once done_

 private:
  const size_t max_inflight_;
  absl::Mutex receive_mutex_;  // taken before mutex_
  std::deque<AttendStream::Answer> answers_ ABSL_GUARDED_BY(receive_mutex_);
  size_t to_receive_ ABSL_GUARDED_BY(receive_mutex_) = 0;
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_STREAM_CORE_H_
