// All sequences of an Engine and the model of each, shared by the threads of a test.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "server/engine/engine.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"
#include "tests/engine/sequence_model.h"

namespace flashcore::server::testing {

using SequencePtr = std::shared_ptr<ModelSequence>;

inline constexpr uint32_t kGroup = 2;  // query heads of a KV head

struct Dice {
  std::mt19937 random;

  uint32_t Below(size_t n) { return static_cast<uint32_t>(random() % n); }
  bool OneIn(size_t n) { return Below(n) == 0; }
};

// Thread-safe, except for what needs quiet: no other thread, and no request in flight.
class SequenceWorld {
 public:
  using Copy = void (*)(void* to, const void* from, size_t bytes);

  // `exact`: the device computes exactly what the reference does, and its launches may fail. `copy`
  // can read and write the device's K/V memory, from any thread.
  SequenceWorld(std::unique_ptr<Device> device, bool exact, Copy copy, const Clock* clock);

  Engine& engine() { return engine_; }
  bool device_fails() const { return exact_; }
  Tolerance tolerance(kernels::DType dtype) const {
    return exact_ ? Tolerance() : KernelTolerance(dtype);
  }

  // Null or empty if there is none.
  SequencePtr PickAny(uint32_t random) const;
  std::vector<SequencePtr> PickSome(uint32_t random, size_t count) const;  // of one shape

  // Does nothing if there are too many sequences.
  void Create(uint32_t random, bool pin);
  // The first `length` rows of the parent's layers must not change meanwhile.
  void Fork(const SequencePtr& parent, std::optional<uint64_t> length, bool pin, bool too_long);

  // Deletes any sequence, even one that requests wait for, use or hold locks of.
  void Delete(uint32_t random);

  // The caller holds the locks of `sequence`.
  void ExpectAgrees(const ModelSequence& sequence, const SequenceInfo& info) const;
  // An operation was refused if and only if it was `wrong` or the sequence is deleted.
  void ExpectOutcome(const absl::Status& status, const ModelSequence& sequence, bool wrong);
  // The status of the job; aborts the process if it does not end.
  absl::Status WaitFor(AttendJob* job);

  // Moves pages between the segments until `stop`.
  void MovePagesUntil(const std::atomic<bool>& stop, unsigned seed);

  // These need quiet.
  void ExpectAllAgree();
  void ExpectEveryOutcome() const;
  void DeleteAll();
  void ExpectEmpty();

 private:
  static Engine::Options EngineOptions();
  bool Full() const;
  void Add(const SequencePtr& sequence);
  SequencePtr Remove(uint32_t random);
  void ExpectHolds(const ModelSequence& sequence, uint32_t layer);

  const bool exact_;
  const Copy copy_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  Engine engine_;
  PageCount pages_;  // expected
  mutable std::mutex mutex_;
  std::vector<SequencePtr> sequences_;
  std::map<absl::StatusCode, int> outcomes_;  // of queued requests
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_
