// The whole engine under random interleavings of many threads, compared with a plain model: every
// output, every length, every page count, and every byte of every sequence.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/device/device_setting.h"
#include "tests/device/reference_device.h"
#include "tests/engine/sequence_burst.h"
#include "tests/engine/sequence_world.h"

namespace flashcore::server {
namespace {

using testing::ModelSequence;
using testing::SequencePtr;
using testing::SequenceWorld;

// The random operations of one thread.
class Worker {
 public:
  Worker(SequenceWorld* world, unsigned seed) : world_(*world), dice_{std::mt19937(seed)} {}

  void Run(int steps) {
    for (; steps > 0 && !::testing::Test::HasFailure(); --steps) Step();
  }

 private:
  using Locks = std::vector<std::shared_lock<std::shared_mutex>>;

  void Step() {
    switch (dice_.Below(20)) {
      case 0:
      case 1:
        return Create();
      case 2:
        return Fork();
      case 3:
        return Truncate();
      case 4:
        return Describe();
      case 5:
        return world_.Delete(dice_.random());
      default:
        return testing::SequenceBurst(&world_, &dice_).Run();
    }
  }

  void Create() { world_.Create(dice_.random(), dice_.OneIn(4)); }

  void Fork() {
    const SequencePtr parent = world_.PickAny(dice_.random());
    if (parent == nullptr) return;
    const Locks locks = LockAllShared(*parent);
    const uint64_t shortest = Shortest(*parent);
    std::optional<uint64_t> length;
    if (dice_.OneIn(2)) length = dice_.Below(static_cast<uint32_t>(shortest) + 1);
    if (dice_.OneIn(8)) length = shortest + 1;
    world_.Fork(parent, length, dice_.OneIn(4), length > shortest);
  }

  void Truncate() {
    const SequencePtr sequence = world_.PickAny(dice_.random());
    if (sequence == nullptr) return;
    for (std::shared_mutex& lock : sequence->locks) lock.lock();
    const uint64_t shortest = Shortest(*sequence);
    const bool too_long = dice_.OneIn(8);
    const uint64_t length =
        too_long ? shortest + 1 : dice_.Below(static_cast<uint32_t>(shortest) + 1);
    std::optional<uint64_t> expected;
    if (dice_.OneIn(2)) expected = sequence->layers[0].length();
    const auto info = world_.engine().sequences().Truncate(sequence->id, length, expected);
    if (info.ok()) {
      for (testing::ModelLayer& layer : sequence->layers) layer.Truncate(length);
      world_.ExpectAgrees(*sequence, *info);
    }
    world_.ExpectOutcome(info.status(), *sequence, too_long);
    for (std::shared_mutex& lock : sequence->locks) lock.unlock();
  }

  void Describe() {
    const SequencePtr sequence = world_.PickAny(dice_.random());
    if (sequence == nullptr) return;
    const Locks locks = LockAllShared(*sequence);
    const auto info = world_.engine().sequences().Get(sequence->id);
    if (info.ok()) world_.ExpectAgrees(*sequence, *info);
    world_.ExpectOutcome(info.status(), *sequence, false);
  }

  static uint64_t Shortest(const ModelSequence& sequence) {
    const std::vector<uint64_t> lengths = sequence.lengths();
    return *std::min_element(lengths.begin(), lengths.end());
  }

  static Locks LockAllShared(ModelSequence& sequence) {
    Locks locks;
    for (std::shared_mutex& lock : sequence.locks) locks.emplace_back(lock);
    return locks;
  }

  SequenceWorld& world_;
  testing::Dice dice_;
};

constexpr size_t kKvBytes = size_t{768} << 10;
constexpr size_t kHotBytes = size_t{192} << 10;

void ExpectAgreesWithTheModel(SequenceWorld* tested, unsigned seed) {
  constexpr int kRounds = 6, kWorkers = 5, kSteps = 100;
  SequenceWorld& world = *tested;
  for (int round = 0; round < kRounds && !::testing::Test::HasFailure(); ++round) {
    std::vector<std::thread> threads;
    std::atomic<bool> stop{false};
    std::thread movers[] = {std::thread([&] { world.MovePagesUntil(stop, seed + round); }),
                            std::thread([&] { world.MovePagesUntil(stop, ~seed + round); })};
    for (int i = 0; i < kWorkers; ++i) {
      const unsigned worker_seed = seed + 1000 * (round + 1) + i;
      threads.emplace_back([&world, worker_seed] { Worker(&world, worker_seed).Run(kSteps); });
    }
    for (std::thread& thread : threads) thread.join();
    stop = true;
    for (std::thread& mover : movers) mover.join();
    world.ExpectAllAgree();
  }
  world.ExpectEveryOutcome();
  world.DeleteAll();
  world.ExpectAllAgree();
  world.ExpectEmpty();
}

class SequencesPropertyTest : public ::testing::TestWithParam<testing::DeviceSetting> {};

TEST_P(SequencesPropertyTest, AgreesWithTheModel) {
  const testing::DeviceSetting& setting = GetParam();
  if (const std::string why = setting.why_none(); !why.empty()) GTEST_SKIP() << why;
  const SteadyClock clock;
  SequenceWorld world(setting.make(kKvBytes, kHotBytes, &clock), false, setting.copy, &clock);
  ExpectAgreesWithTheModel(&world, testing::TestSeed());
}

INSTANTIATE_TEST_SUITE_P(Devices, SequencesPropertyTest,
                         ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

TEST(SequencesPropertyOnReferenceTest, AgreesWithTheModel) {
  const SteadyClock clock;
  const unsigned seed = testing::TestSeed();
  testing::HeapDevice::Options options;
  options.lanes = 6;
  options.kv_memory_bytes = kKvBytes;
  options.kv_hot_bytes = kHotBytes;
  SequenceWorld world(std::make_unique<testing::ReferenceDevice>(options, seed), true,
                      testing::CopyOnHost, &clock);
  ExpectAgreesWithTheModel(&world, seed);
}

}  // namespace
}  // namespace flashcore::server
