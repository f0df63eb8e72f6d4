// All sequences of an Engine and the model of each, shared by the threads of a test.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"
#include "tests/engine/sequence_model.h"

namespace flashcore::server::testing {

using SequencePtr = std::shared_ptr<ModelSequence>;

inline constexpr uint32_t kGroup = 2;  // query heads of a KV head

// Everybody who takes part belongs to this group, with which all sequences are shared.
inline constexpr const char* kGroupName = "world";
inline Identity IdentityOf(const std::string& client) { return {client, {kGroupName}}; }

struct Dice {
  std::mt19937 random;

  uint32_t Below(size_t n) { return static_cast<uint32_t>(random() % n); }
  bool OneIn(size_t n) { return Below(n) == 0; }
};

// Thread-safe, except for what needs quiet: no other thread, and no request in flight.
class SequenceWorld {
 public:
  using Copy = void (*)(void* to, const void* from, size_t bytes);

  struct Setup {
    // The device computes exactly what the reference does, and its launches may fail.
    bool exact = false;
    Copy copy = nullptr;  // reads and writes the device's K/V memory, from any thread
    uint64_t length = 0;  // rows, up to which sequences grow
    const Clock* clock = nullptr;
    // Not null: it is also `clock`, and the engine has limits. It evicts, sequences expire, clients
    // have quotas, and staging memory is so small that requests wait for it or are refused.
    FakeClock* limits_clock = nullptr;
    // Not 0: some launches are cut into parts, which the device should execute in this time.
    Nanoseconds max_launch{0};
  };
  SequenceWorld(std::unique_ptr<Device> device, const Setup& setup);

  Engine& engine() { return engine_; }
  const Clock& clock() const { return *setup_.clock; }
  uint64_t length() const { return setup_.length; }
  bool device_fails() const { return setup_.exact; }
  bool cuts() const { return setup_.max_launch > Nanoseconds(0); }
  bool has_limits() const { return setup_.limits_clock != nullptr; }
  Tolerance tolerance(kernels::DType dtype) const {
    return setup_.exact ? Tolerance() : KernelTolerance(dtype);
  }

  // Null or empty if there is none.
  SequencePtr PickAny(uint32_t random) const;
  std::vector<SequencePtr> PickSome(Dice* dice, size_t count) const;  // of one shape

  // Does nothing if there are too many sequences.
  void Create(Dice* dice);
  // The first `length` rows of the parent's layers must not change meanwhile.
  void Fork(const SequencePtr& parent, std::optional<uint64_t> length, Dice* dice, bool too_long);

  // Clients that do not own a sequence of the world try to change it or to see it: in vain.
  void Trespass(const SequencePtr& sequence, Dice* dice);

  // Deletes any sequence, even one that requests wait for, use or hold locks of.
  void Delete(uint32_t random);

  // The caller holds the locks of `sequence`.
  void ExpectAgrees(const ModelSequence& sequence, const SequenceInfo& info) const;
  // An operation was refused if and only if it was `wrong` or the sequence is gone.
  void ExpectOutcome(const absl::Status& status, const SequencePtr& sequence, bool wrong);
  // The engine does not find a sequence that nobody deletes: it must have expired or been evicted.
  void ExpectLost(const SequencePtr& sequence);
  // Notes that something happened that the test is about.
  void Note(const std::string& what);
  // Advances the clock a little, if it is fake.
  void PassTime(Dice* dice);
  // The status of the job; aborts the process if it does not end.
  absl::Status WaitFor(AttendJob* job);

  // Moves pages between the segments until `stop`.
  void MovePagesUntil(const std::atomic<bool>& stop, unsigned seed);

  // These need quiet.
  void ExpectAllAgree();
  // The events that the test is about and that have not happened yet.
  std::vector<std::string> MissingOutcomes() const;
  void DeleteAll();
  void ExpectEmpty();

 private:
  Engine::Options EngineOptions() const;
  bool Full() const;
  // Whether the creation of a sequence was refused because of the client's quota.
  bool OverQuota(const absl::Status& status);
  void CountLost(const ModelSequence& sequence);  // needs mutex_
  void ExpectLimitsHold();
  void Add(const SequencePtr& sequence);
  SequencePtr Remove(uint32_t random);
  void ExpectHolds(const ModelSequence& sequence, uint32_t layer);

  const Setup setup_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  Engine engine_;
  PageCount pages_;  // expected
  mutable std::mutex mutex_;
  std::vector<SequencePtr> sequences_;
  uint64_t families_ = 0;
  uint64_t lost_ = 0;                 // expired or evicted
  uint64_t lost_early_ = 0;           // before they could expire
  std::map<std::string, int> noted_;  // also how queued requests ended
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_SEQUENCE_WORLD_H_
