// The streams that are open, so that a drain can end them.
#ifndef FLASHCORE_SERVER_TRANSPORT_STREAM_SET_H_
#define FLASHCORE_SERVER_TRANSPORT_STREAM_SET_H_

#include <unordered_set>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"

namespace flashcore::server {

// A stream that takes requests from its client.
class RequestStream {
 public:
  virtual ~RequestStream() = default;

  // No more requests: the stream will end with `status`, once what it has in flight is answered.
  // The first reason given counts.
  virtual void StopReading(const absl::Status& status) = 0;
};

// Thread-safe.
class StreamSet {
 public:
  void Add(RequestStream* stream) {
    MutexLock lock(&mutex_);
    streams_.insert(stream);
  }
  // Before the stream is deleted; waits while Drain runs.
  void Remove(RequestStream* stream) {
    MutexLock lock(&mutex_);
    streams_.erase(stream);
  }
  // Stops every stream with UNAVAILABLE.
  void Drain() {
    MutexLock lock(&mutex_);
    for (RequestStream* stream : streams_) {
      stream->StopReading(absl::UnavailableError("the server is draining"));
    }
  }

 private:
  Mutex mutex_;
  std::unordered_set<RequestStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_STREAM_SET_H_
