#include "server/kv/placement.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <tuple>

namespace flashcore::server {
namespace {

constexpr double kLn2 = 0.693147180559945309;

// The hot or the cold bytes of an unpinned candidate.
struct Part {
  size_t candidate = 0;
  size_t bytes = 0;
  bool hot = false;
  double worth = 0;  // reads of each byte a second; times the hysteresis if it is hot

  // In the order in which parts get room. The hot bytes of a candidate come before its cold ones.
  bool operator<(const Part& other) const {
    return std::tie(other.worth, other.hot, candidate) < std::tie(worth, hot, other.candidate);
  }
};

// The parts that may be hot, in the order in which they get room.
std::vector<Part> OrderedParts(absl::Span<const PlacementCandidate> candidates,
                               const PlacementOptions& options) {
  std::vector<Part> parts;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const PlacementCandidate& candidate = candidates[i];
    if (candidate.pinned || candidate.bytes == 0) continue;
    assert(candidate.bytes_read_per_second >= 0);
    const double reads = candidate.bytes_read_per_second / static_cast<double>(candidate.bytes);
    const size_t hot = std::min(candidate.hot_bytes, candidate.bytes);
    const size_t cold = candidate.bytes - hot;
    if (hot > 0) parts.push_back({i, hot, true, reads * options.hysteresis});
    if (cold > 0 && reads >= options.min_reads_per_second) parts.push_back({i, cold, false, reads});
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

}  // namespace

void ReadRate::Add(double bytes, TimePoint now) {
  // As if the bytes were read at a rate that decays from now on: its integral is `bytes`.
  rate_ = BytesPerSecond(now) + bytes * kLn2 / Seconds(kHalfLife);
  last_ = std::max(last_, now);
}

double ReadRate::BytesPerSecond(TimePoint now) const {
  if (now <= last_) return rate_;
  return rate_ * std::exp2(-Seconds(now - last_) / Seconds(kHalfLife));
}

std::vector<size_t> ChooseHotBytes(absl::Span<const PlacementCandidate> candidates,
                                   const PlacementOptions& options) {
  assert(options.hysteresis >= 1);
  std::vector<size_t> chosen(candidates.size());
  size_t room = options.capacity_bytes;
  const auto give = [&](size_t candidate, size_t bytes) {
    const size_t given = std::min(bytes, room);
    chosen[candidate] += given;
    room -= given;
  };
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].pinned) give(i, candidates[i].bytes);
  }
  for (const Part& part : OrderedParts(candidates, options)) give(part.candidate, part.bytes);
  return chosen;
}

}  // namespace flashcore::server
