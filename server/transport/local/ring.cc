#include "server/transport/local/ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server::local {
namespace {

absl::Status CheckShape(const SharedRegion& region, const Ring::Shape& shape) {
  const auto invalid = [](const auto&... args) {
    return absl::InvalidArgumentError(absl::StrCat(args...));
  };
  if (region.device() != SharedRegion::kHost) {
    return invalid("region_id: the region is device memory; a ring is in host memory");
  }
  if (region.read_only()) return invalid("region_id: the region is read_only");
  if (shape.slots < 1 || shape.slots > wire::kMaxSlots || (shape.slots & (shape.slots - 1)) != 0) {
    return invalid("slots: ", shape.slots, " is not a power of two in 1..", wire::kMaxSlots);
  }
  if (shape.slot_bytes < wire::kMinSlotBytes || shape.slot_bytes > wire::kMaxSlotBytes ||
      shape.slot_bytes % wire::kRingAlignment != 0) {
    return invalid("slot_bytes: ", shape.slot_bytes, " is not a multiple of ", wire::kRingAlignment,
                   " in ", wire::kMinSlotBytes, "..", wire::kMaxSlotBytes);
  }
  if (shape.offset % wire::kRingAlignment != 0) {
    return invalid("offset: ", shape.offset, " is not a multiple of ", wire::kRingAlignment);
  }
  const uint64_t bytes = wire::RingBytes(shape.slots, shape.slot_bytes);
  if (bytes > region.bytes() || shape.offset > region.bytes() - bytes) {
    return invalid("offset: ", shape.offset, ", and the ring has ", bytes,
                   " bytes; the region has ", region.bytes());
  }
  return absl::OkStatus();
}

absl::Status Broken(const char* counter, uint64_t value, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("ring: the counter ", counter, " says ", value, ", ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ring>> Ring::Open(std::shared_ptr<const SharedRegion> region,
                                                 const Shape& shape) {
  if (absl::Status status = CheckShape(*region, shape); !status.ok()) return status;
  return absl::WrapUnique(new Ring(std::move(region), shape));
}

Ring::Ring(std::shared_ptr<const SharedRegion> region, const Shape& shape)
    : region_(std::move(region)),
      shape_(shape),
      header_(reinterpret_cast<wire::RingHeader*>(region_->data() + shape.offset)),
      submissions_(region_->data() + shape.offset + sizeof(wire::RingHeader)),
      completions_(region_->data() + shape.offset + sizeof(wire::RingHeader) +
                   size_t{shape.slots} * shape.slot_bytes) {}

absl::Status Ring::Check(uint64_t submitted, uint64_t received) const {
  if (received - received_ > completed_.load() - received_) {
    return Broken("received", received,
                  "beyond the answers that were written, or less than it did");
  }
  // The same as for the client: neither direction can overflow.
  if (submitted - received > shape_.slots || submitted - taken_ > shape_.slots) {
    return Broken("submitted", submitted,
                  absl::StrCat("but the ring has ", shape_.slots, " slots, and ", received,
                               " answers were received"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Ring::Take(wire::SubmissionSlot* header, std::string* message) {
  const uint64_t submitted = header_->submitted.load(std::memory_order_acquire);
  if (submitted == taken_) return false;
  // After `submitted`: the client may have received answers to make room.
  const uint64_t received = header_->received.load(std::memory_order_acquire);
  absl::Status status = region_->Check();
  if (status.ok()) status = Check(submitted, received);
  if (!status.ok()) return status;
  received_ = received;
  const std::byte* const slot =
      submissions_ + (taken_ & (shape_.slots - 1)) * size_t{shape_.slot_bytes};
  std::memcpy(header, slot, sizeof(*header));
  // The compiler must not read the slot a second time.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  const size_t room = shape_.slot_bytes - sizeof(*header);
  if (header->bytes > room) {
    return absl::InvalidArgumentError(
        absl::StrCat("ring: a slot with ", header->bytes, " bytes; it has room for ", room));
  }
  message->assign(reinterpret_cast<const char*>(slot + sizeof(*header)), header->bytes);
  ++taken_;
  header_->taken.store(taken_, std::memory_order_release);
  return true;
}

void Ring::SetServerSleeps(bool sleeps) {
  header_->server_sleeps.store(sleeps ? 1 : 0, std::memory_order_relaxed);
  if (sleeps) std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Ring::Answer(uint64_t tag, absl::string_view message) {
  {
    MutexLock lock(&mutex_);
    const uint64_t number = completed_.load(std::memory_order_relaxed);
    std::byte* const slot =
        completions_ + (number & (shape_.slots - 1)) * size_t{shape_.slot_bytes};
    const wire::CompletionSlot header = {tag, static_cast<uint32_t>(message.size()), 0};
    std::memcpy(slot, &header, sizeof(header));
    std::memcpy(slot + sizeof(header), message.data(), message.size());
    completed_.store(number + 1);  // before the client can say that it has received it
    header_->completed.store(number + 1, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic<uint32_t>& sleeps = header_->client_sleeps;
  if (sleeps.load(std::memory_order_relaxed) == 0 || sleeps.exchange(0) == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&sleeps), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace flashcore::server::local
