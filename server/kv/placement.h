// Which sequences' K/V should lie in the hot segment: pure policy, on numbers only.
#ifndef FLASHCORE_SERVER_KV_PLACEMENT_H_
#define FLASHCORE_SERVER_KV_PLACEMENT_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "server/base/clock.h"

namespace flashcore::server {

// How fast something is read, with the past forgotten exponentially: what was read kHalfLife ago
// counts half. A steady reading shows at its true rate after a few half-lives; one single read of n
// bytes shows as n * ln 2 / kHalfLife, about 0.07 n a second. Not thread-safe.
class ReadRate {
 public:
  static constexpr Nanoseconds kHalfLife = std::chrono::seconds(10);

  // A time before that of an earlier call counts as that one: threads read the clock before they
  // wait for their turn.
  void Add(double bytes, TimePoint now);
  double BytesPerSecond(TimePoint now) const;

 private:
  double rate_ = 0;  // bytes per second, at last_
  TimePoint last_{};
};

// One sequence as the policy sees it.
struct PlacementCandidate {
  size_t bytes = 0;      // of K/V that can move: all its full pages
  size_t hot_bytes = 0;  // of these, in the hot segment now
  bool pinned = false;
  double bytes_read_per_second = 0;  // of its K/V; not negative
};

struct PlacementOptions {
  size_t capacity_bytes = 0;  // of the hot segment, for the candidates together
  // An unpinned sequence displaces another only if each of its bytes is read more than so many
  // times as often: otherwise two that are alike would take turns. At least 1.
  double hysteresis = 2;
  // Below so many reads of each byte a second a sequence is not worth promoting.
  double min_reads_per_second = 0.1;
};

// How many bytes of each candidate should be hot, [candidates], each at most its `bytes`, together
// at most the capacity. A sequence may be hot in part, from its start, where shared prefixes lie.
//
// Pinned ones come first, in their order, the last with what is left. Then those whose bytes are
// read most often, in O(n log n). What is hot stays, even if nobody reads it, until something wants
// its room, for moving it out gains nothing; what is read least often gives way first.
//
// If nothing else changes, the answer is final: the same question with the answer as hot_bytes has
// the same answer. Of equals, the one that is hot goes before the one that is not, then the first.
std::vector<size_t> ChooseHotBytes(absl::Span<const PlacementCandidate> candidates,
                                   const PlacementOptions& options);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_PLACEMENT_H_
