// The server's end of a ring in a client's memory; proto/wire/ring.h describes the layout.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/wire/ring.h"
#include "server/base/mutex.h"
#include "server/memory/shared_region.h"

namespace flashcore::server::local {

// The client can change all of that memory at any time. So each value is read once, and checked
// against what this keeps for itself.
class Ring {
 public:
  struct Shape {
    uint64_t offset = 0;  // in the region
    uint32_t slots = 0;
    uint32_t slot_bytes = 0;
  };

  // INVALID_ARGUMENT for a shape that is not allowed or leaves the region, or a region that is
  // read-only. Keeps the region mapped.
  static absl::StatusOr<std::unique_ptr<Ring>> Open(std::shared_ptr<const SharedRegion> region,
                                                    const Shape& shape);

  // The next three are for one thread, the one that takes requests.

  // Copies the next request. False: there is none. INVALID_ARGUMENT: the client broke the protocol,
  // and nothing more can be taken.
  absl::StatusOr<bool> Take(wire::SubmissionSlot* header, std::string* message);
  // Whether the client says that there is something to take, or broke the protocol.
  bool HasNews() const { return header_->submitted.load(std::memory_order_acquire) != taken_; }
  // The value that the client wrote: any number. From any thread.
  uint64_t submitted() const { return header_->submitted.load(std::memory_order_acquire); }
  uint32_t slots() const { return shape_.slots; }
  // 1 tells the client to ring the doorbell. HasNews after this sees every request that comes
  // without the doorbell.
  void SetServerSleeps(bool sleeps);

  // Answers a request that was taken, once. `message` fits a slot. From any thread.
  void Answer(uint64_t tag, absl::string_view message) ABSL_LOCKS_EXCLUDED(mutex_);
  // Limit of the message of an answer.
  size_t max_answer_bytes() const { return shape_.slot_bytes - sizeof(wire::CompletionSlot); }

 private:
  Ring(std::shared_ptr<const SharedRegion> region, const Shape& shape);
  absl::Status Check(uint64_t submitted, uint64_t received) const;

  const std::shared_ptr<const SharedRegion> region_;
  const Shape shape_;
  wire::RingHeader* const header_;
  const std::byte* const submissions_;
  std::byte* const completions_;
  uint64_t taken_ = 0;
  uint64_t received_ = 0;  // by the client, when last seen
  std::atomic<uint64_t> completed_{0};
  Mutex mutex_;  // held while an answer is written
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_H_
