// The metrics that a request touches on its way: no look-up, no lock, no cache line that two busy
// threads write to. Each thread adds to its own shard; a scrape sums the shards.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRIC_H_
#define FLASHCORE_SERVER_TELEMETRY_METRIC_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashcore::server {

namespace telemetry_internal {

inline constexpr unsigned kShards = 16;  // power of two; more threads than this share shards
inline constexpr size_t kCacheLine = 64;

unsigned AssignShard();

// The calling thread's shard. Threads get shards in turn.
inline unsigned ThreadShard() {
  constexpr unsigned kUnassigned = ~0u;
  thread_local unsigned shard = kUnassigned;
  if (shard == kUnassigned) shard = AssignShard();
  return shard;
}

template <typename T>
struct alignas(kCacheLine) PaddedAtomic {
  std::atomic<T> value{0};
};

// The sum of what all threads added. Thread-safe.
template <typename T>
class ShardedSum {
 public:
  void Add(T n) { shards_[ThreadShard()].value.fetch_add(n, std::memory_order_relaxed); }
  T Value() const {
    T sum = 0;
    for (const auto& shard : shards_) sum += shard.value.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  std::array<PaddedAtomic<T>, kShards> shards_;
};

}  // namespace telemetry_internal

// Only grows. Thread-safe.
class Counter {
 public:
  void Increment(uint64_t n = 1) { sum_.Add(n); }
  uint64_t Value() const { return sum_.Value(); }

 private:
  telemetry_internal::ShardedSum<uint64_t> sum_;
};

// Goes up and down. Its value is what was last Set plus all that was ever Added, so use one of the
// two on one gauge. Thread-safe.
class Gauge {
 public:
  void Set(int64_t value) { set_.store(value, std::memory_order_relaxed); }
  void Add(int64_t n) { added_.Add(n); }
  int64_t Value() const { return set_.load(std::memory_order_relaxed) + added_.Value(); }

 private:
  std::atomic<int64_t> set_{0};
  telemetry_internal::ShardedSum<int64_t> added_;
};

// Counts observations in buckets. Thread-safe.
class Histogram {
 public:
  // `bounds`: inclusive upper bounds of the buckets, ascending, at most kMaxBounds; one more bucket
  // counts what is above the last.
  static constexpr size_t kMaxBounds = 31;
  explicit Histogram(const std::vector<double>& bounds);
  Histogram(const Histogram&) = delete;
  Histogram& operator=(const Histogram&) = delete;

  // A negative value and NaN count as 0: one bad clock reading must not spoil the sum for ever.
  void Observe(double value) {
    if (!(value > 0)) value = 0;
    Shard& shard = shards_[telemetry_internal::ThreadShard()];
    shard.counts[BucketOf(value)].fetch_add(1, std::memory_order_relaxed);
    double sum = shard.sum.load(std::memory_order_relaxed);
    while (!shard.sum.compare_exchange_weak(sum, sum + value, std::memory_order_relaxed)) {
    }
  }

  // The state at one moment, except that observations made meanwhile may be counted in part.
  struct Snapshot {
    std::vector<uint64_t> counts;  // [bounds + 1], not cumulative
    double sum = 0;
  };
  Snapshot Read() const;

  const std::vector<double>& bounds() const { return bounds_; }

 private:
  struct alignas(telemetry_internal::kCacheLine) Shard {
    std::array<std::atomic<uint64_t>, kMaxBounds + 1> counts{};
    std::atomic<double> sum{0};
  };

  // The number of bounds below `value`. Five steps without a branch: a mispredicted one would cost
  // more than the whole search.
  size_t BucketOf(double value) const {
    const double* base = padded_bounds_.data();
    size_t bucket = 0;
    for (size_t step = 16; step > 0; step /= 2) {
      bucket += base[bucket + step - 1] < value ? step : 0;
    }
    return bucket;
  }

  std::array<double, kMaxBounds> padded_bounds_;  // with infinity, to make the search regular
  std::vector<double> bounds_;
  std::array<Shard, telemetry_internal::kShards> shards_;
};

// 1 us to 10 s, in steps of 1, 2, 5.
std::vector<double> LatencyBounds();
// 1, 2, 4, ... up to `largest`, a power of two.
std::vector<double> PowerOfTwoBounds(uint64_t largest);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRIC_H_
