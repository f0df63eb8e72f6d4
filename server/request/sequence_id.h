// The id by which requests name a sequence.
#ifndef FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_
#define FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// Random bytes, so that ids cannot be guessed. The devices of a server share them out by remainder.
struct SequenceId {
  static constexpr size_t kBytes = 16;

  uint64_t high = 0;
  uint64_t low = 0;

  static SequenceId Random();
  // One that is of `device`, of `devices` numbered from 0.
  static SequenceId Random(size_t device, size_t devices);
  // Nothing unless `bytes` has kBytes.
  static std::optional<SequenceId> FromBytes(absl::string_view bytes);
  std::string ToBytes() const { return {reinterpret_cast<const char*>(this), kBytes}; }
  size_t DeviceOf(size_t devices) const { return low % devices; }

  friend bool operator==(const SequenceId& a, const SequenceId& b) {
    return a.high == b.high && a.low == b.low;
  }
  template <typename H>
  friend H AbslHashValue(H h, const SequenceId& id) {
    return H::combine(std::move(h), id.high, id.low);
  }
};
static_assert(sizeof(SequenceId) == SequenceId::kBytes);

// The id of a client's lease (engine/client_lease.h).
using LeaseId = SequenceId;

// The sequence_id field of a request: empty, a valid id, or bytes of another length (only the
// length is kept). Takes no heap memory.
class SequenceName {
 public:
  SequenceName() = default;
  // NOLINTBEGIN(google-explicit-constructor): it is the bytes.
  SequenceName(absl::string_view bytes) : size_(bytes.size()) {
    if (const auto id = SequenceId::FromBytes(bytes); id.has_value()) id_ = *id;
  }
  SequenceName(const std::string& bytes) : SequenceName(absl::string_view(bytes)) {}
  SequenceName(const char* bytes) : SequenceName(absl::string_view(bytes)) {}
  // NOLINTEND(google-explicit-constructor)

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  bool is_id() const { return size_ == SequenceId::kBytes; }
  SequenceId id() const { return id_; }  // if is_id()

 private:
  SequenceId id_;
  size_t size_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_
