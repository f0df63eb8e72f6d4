#include "server/request/sequence_id.h"

#include <cstring>
#include <random>

namespace flashcore::server {

SequenceId SequenceId::Random(uint8_t device) {
  // Reads the operating system's random source, 32 bits at a time.
  thread_local std::random_device random;
  const auto bits = [] { return uint64_t{random()} << 32 | random(); };
  SequenceId id;
  id.high = bits() / kDevices * kDevices + device;
  id.low = bits();
  return id;
}

std::optional<SequenceId> SequenceId::FromBytes(absl::string_view bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  SequenceId id;
  std::memcpy(&id, bytes.data(), kBytes);
  return id;
}

}  // namespace flashcore::server
