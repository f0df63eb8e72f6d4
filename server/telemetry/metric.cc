#include "server/telemetry/metric.h"

#include <algorithm>
#include <limits>

namespace flashcore::server {

namespace telemetry_internal {

unsigned AssignShard() {
  static std::atomic<unsigned> next{0};
  return next.fetch_add(1, std::memory_order_relaxed) % kShards;
}

}  // namespace telemetry_internal

Histogram::Histogram(const std::vector<double>& bounds)
    : bounds_(bounds.begin(), bounds.begin() + std::min(bounds.size(), kMaxBounds)) {
  padded_bounds_.fill(std::numeric_limits<double>::infinity());
  std::copy(bounds_.begin(), bounds_.end(), padded_bounds_.begin());
}

Histogram::Snapshot Histogram::Read() const {
  Snapshot snapshot;
  snapshot.counts.resize(bounds_.size() + 1);
  for (const Shard& shard : shards_) {
    for (size_t i = 0; i < snapshot.counts.size(); ++i) {
      snapshot.counts[i] += shard.counts[i].load(std::memory_order_relaxed);
    }
    snapshot.sum += shard.sum.load(std::memory_order_relaxed);
  }
  return snapshot;
}

std::vector<double> LatencyBounds() {
  // Written out: powers of ten computed in binary would show as 9.999999999999999e-06.
  return {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3,
          5e-3, 1e-2, 2e-2, 5e-2, 0.1,  0.2,  0.5,  1,    2,    5,    10};
}

std::vector<double> PowerOfTwoBounds(uint64_t largest) {
  std::vector<double> bounds;
  for (uint64_t bound = 1; bound <= largest && bounds.size() < Histogram::kMaxBounds; bound *= 2) {
    bounds.push_back(static_cast<double>(bound));
  }
  return bounds;
}

}  // namespace flashcore::server
