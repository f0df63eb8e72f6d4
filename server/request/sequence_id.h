// The id of a sequence: what a request names it by.
#ifndef FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_
#define FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// The number of its device, and 120 random bits: who does not know an id cannot guess it.
struct SequenceId {
  static constexpr size_t kBytes = 16;
  static constexpr size_t kDevices = 256;  // that an id can tell apart

  uint64_t high = 0;
  uint64_t low = 0;

  static SequenceId Random(uint8_t device);
  static std::optional<SequenceId> FromBytes(absl::string_view bytes);  // none unless kBytes long
  std::string ToBytes() const;
  uint8_t device() const { return static_cast<uint8_t>(high % kDevices); }

  friend bool operator==(const SequenceId& a, const SequenceId& b) {
    return a.high == b.high && a.low == b.low;
  }
  template <typename H>
  friend H AbslHashValue(H h, const SequenceId& id) {
    return H::combine(std::move(h), id.high, id.low);
  }
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SEQUENCE_ID_H_
