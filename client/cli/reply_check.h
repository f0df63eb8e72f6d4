// Whether equal requests get equal answers, at a few places of the output.
#ifndef FLASHCORE_CLIENT_CLI_REPLY_CHECK_H_
#define FLASHCORE_CLIENT_CLI_REPLY_CHECK_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

namespace flashcore::cli {

// The server promises the same bits for the same span. Remembers 16 elements of the first answer to
// each distinct request. Not thread-safe.
class ReplyCheck {
 public:
  // Before a request: NaN where Matches will look, so that an answer which was not written shows.
  static void Poison(absl::Span<uint16_t> output);

  // Whether `output` (not empty) is as it was for the first request of the same key.
  bool Matches(uint64_t key, absl::Span<const uint16_t> output);

  bool empty() const { return expected_.empty(); }  // no answer was seen yet

 private:
  static constexpr size_t kProbes = 16;

  static size_t Probe(size_t i, size_t elements) { return i * (elements - 1) / (kProbes - 1); }

  absl::flat_hash_map<uint64_t, std::array<uint16_t, kProbes>> expected_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_REPLY_CHECK_H_
