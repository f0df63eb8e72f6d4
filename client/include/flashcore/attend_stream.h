// Many requests in flight on one RPC, answered in any order.
#ifndef FLASHCORE_ATTEND_STREAM_H_
#define FLASHCORE_ATTEND_STREAM_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "flashcore/attend.h"

namespace flashcore {

namespace client {
class Connection;
class StreamCore;
}  // namespace client

struct StreamOptions {
  // Most unanswered requests; beyond them Send is RESOURCE_EXHAUSTED. Bounds the memory of messages
  // that the server has not read yet.
  size_t max_inflight = 256;
  // Deadline of the whole stream, which ends then.
  absl::Time deadline = absl::InfiniteFuture();
  // Deadline of each request, from when the server has it, or with a local target from Send. The
  // server drops a request that is still queued then, and answers DEADLINE_EXCEEDED; the stream
  // stays usable. Positive; infinite: none.
  absl::Duration timeout = absl::InfiniteDuration();
  // Affinity of all its requests: see CallOptions. The sequences they name must have the same
  // affinity.
  std::string affinity;
};

// An open AttendStream, from Client::OpenStream. Thread-safe. Nothing is retried: a broken stream
// stays broken, and its requests end with the status of the stream. With a local target it is the
// connection that a stream breaks with; its first Send connects.
class AttendStream {
 public:
  // Runs on a thread of the library, must not block, and may call Send; it must not destroy the
  // stream.
  using Callback = std::function<void(absl::Status, AttendResult)>;

  // An answer for Receive.
  struct Answer {
    absl::Status status;
    AttendResult result;  // result.request_id is set whatever the status
  };

  // Cancels unanswered requests, and returns when every callback has run.
  ~AttendStream();
  AttendStream(const AttendStream&) = delete;
  AttendStream& operator=(const AttendStream&) = delete;

  // Queues a copy of the request and returns at once. If OK, `done` runs exactly once, with the
  // result or with the status that ended the stream; output and lse must live until then. If not
  // OK, it never runs:
  //   INVALID_ARGUMENT    the shapes do not match the memory, or there is no request_id
  //   ALREADY_EXISTS      a request of that request_id is in flight on this stream
  //   RESOURCE_EXHAUSTED  max_inflight are unanswered, or the message is over max_message_bytes,
  //                       or over the server's limit if GetServerInfo has told it
  //   FAILED_PRECONDITION Finish was called
  //   otherwise           the status that ended the stream
  absl::Status Send(const AttendRequest& request, Callback done);

  // The same, with the answer for Receive.
  absl::Status Send(const AttendRequest& request);

  // Blocks until one of the requests sent without a callback is answered. False if there is none.
  bool Receive(Answer* answer);

  // Allows no more Sends, and blocks until all requests are answered and every callback has run.
  // Returns the status of the stream. Can be called again, but not from a callback.
  absl::Status Finish();

  // Ends unanswered requests with CANCELLED. Does not block.
  void Cancel();

 private:
  friend class Client;
  AttendStream(std::shared_ptr<const client::Connection> connection,
               std::shared_ptr<client::StreamCore> core);
  static std::unique_ptr<AttendStream> Open(
      const std::shared_ptr<const client::Connection>& connection, const StreamOptions& options);

  const std::shared_ptr<const client::Connection> connection_;
  const std::shared_ptr<client::StreamCore> core_;  // null: opened in a child that was forked
};

}  // namespace flashcore

#endif  // FLASHCORE_ATTEND_STREAM_H_
