// Requests in the order of a CUDA stream, by counters that the stream and the server write and
// await. Internal to the clients; proto/flashcore/v1/attention.proto describes TimelinePoint.
#ifndef FLASHCORE_CLIENT_LOCAL_TIMELINE_H_
#define FLASHCORE_CLIENT_LOCAL_TIMELINE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "client/local/connection.h"
#include "client/local/cuda.h"
#include "client/local/fields.h"
#include "client/local/memory.h"
#include "client/local/status.h"
#include "client/local/timed_mutex.h"

namespace flashcore::client::local {

// Two counters for each stream of a client, in memory that CUDA and the server map. Request n of a
// stream makes it write n to `inputs` and await n of `results`. Once the connection has ended,
// every stream goes on.
class Timelines {
 public:
  static constexpr size_t kMaxStreams = 64;  // with unfinished requests
  // Most bytes of the fields that Order gives.
  static constexpr size_t kMaxFieldBytes = 70;

  explicit Timelines(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}
  // The connection has ended. Waits for the streams, as cudaFree does.
  ~Timelines();
  Timelines(const Timelines&) = delete;
  Timelines& operator=(const Timelines&) = delete;

  // Makes the counters, unless they are there. Thread-safe.
  Status Open(CuStream stream, SteadyTime deadline);

  // Enqueues on the stream that the inputs of a request are ready, and that its results are
  // awaited. `fields`, until the next call, are to be appended to its AttendRequest, which must be
  // submitted. After an error the stream does not wait. Comes after Open, if the connection has not
  // ended since. One thread at a time.
  Status Order(CuStream stream, std::string_view* fields);

 private:
  // In the memory that is shared. The server writes `results`.
  struct alignas(64) Counter {
    std::atomic<uint64_t> value;
  };
  struct Counters {
    Counter inputs, results;
  };
  struct Stream {
    uint64_t id = 0;    // of cuStreamGetId
    uint64_t last = 0;  // request
    std::atomic<uint64_t> awaited{0};
  };

  Counters* counters() const { return reinterpret_cast<Counters*>(memory_.data()); }
  Status Make(CuStream stream, SteadyTime deadline);
  Status Find(CuStream stream, size_t* index);
  // Whether all requests of the stream have ended, so that its counters can serve another one.
  bool Idle(size_t index) const;
  bool ReleaseStreams();

  const std::shared_ptr<Connection> connection_;
  TimedMutex open_mutex_;
  std::atomic<bool> open_{false};
  // Set by Open:
  const CudaDriver* driver_ = nullptr;
  Memory memory_;
  PinnedMemory pinned_;
  std::string region_id_;
  uint64_t end_hook_ = 0;

  // Used by Order; and `awaited`, when the connection ends.
  std::array<Stream, kMaxStreams> streams_;
  size_t used_ = 0;  // of them
  Writer point_, fields_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_TIMELINE_H_
