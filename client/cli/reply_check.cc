#include "client/cli/reply_check.h"

#include "client/cli/random_request.h"

namespace flashcore::cli {

void ReplyCheck::Poison(absl::Span<uint16_t> output) {
  for (size_t i = 0; i < kProbes; ++i) output[Probe(i, output.size())] = kNanBits;
}

bool ReplyCheck::Matches(uint64_t key, absl::Span<const uint16_t> output) {
  std::array<uint16_t, kProbes> got;
  for (size_t i = 0; i < kProbes; ++i) got[i] = output[Probe(i, output.size())];
  return expected_.try_emplace(key, got).first->second == got;
}

}  // namespace flashcore::cli
