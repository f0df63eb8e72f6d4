#include "server/request/sequence_id.h"

#include <cstring>

#include "server/base/random.h"

namespace flashcore::server {

SequenceId SequenceId::Random() {
  SequenceId id;
  FillRandom(&id, kBytes);
  return id;
}

SequenceId SequenceId::Random(size_t device, size_t devices) {
  SequenceId id = Random();
  while (id.DeviceOf(devices) != device) id = Random();
  return id;
}

std::optional<SequenceId> SequenceId::FromBytes(absl::string_view bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  SequenceId id;
  std::memcpy(&id, bytes.data(), kBytes);
  return id;
}

}  // namespace flashcore::server
