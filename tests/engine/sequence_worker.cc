#include "tests/engine/sequence_worker.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/sequence_burst.h"

namespace flashcore::server::testing {
namespace {

int StepsOfARound(int steps) {
  const char* asked = std::getenv("FLASHCORE_TEST_STEPS");
  return asked != nullptr ? std::atoi(asked) : steps;
}

// Workers and page moves at the same time; then it compares everything.
void RunRound(SequenceWorld* world, unsigned seed, int round, int steps) {
  constexpr int kWorkers = 5;
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::thread movers[] = {std::thread([&] { world->MovePagesUntil(stop, seed + round); }),
                          std::thread([&] { world->MovePagesUntil(stop, ~seed + round); })};
  for (int i = 0; i < kWorkers; ++i) {
    const unsigned worker_seed = seed + 1000 * (round + 1) + i;
    threads.emplace_back(
        [world, worker_seed, steps] { SequenceWorker(world, worker_seed).Run(steps); });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  for (std::thread& mover : movers) mover.join();
  world->ExpectAllAgree();
}

// At least `rounds` rounds, and until `enough` holds, if it is set. Fails if it still does not
// after many rounds: then the test would show less than it seems to. The work in a round differs a
// hundredfold from run to run.
void RunRounds(SequenceWorld* world, unsigned seed, int steps, int rounds,
               const std::function<bool()>& enough) {
  constexpr int kMostRounds = 60;
  for (int round = 0; round < rounds || (enough && !enough()); ++round) {
    if (::testing::Test::HasFailure()) return;
    ASSERT_LT(round, kMostRounds);
    RunRound(world, seed, round, steps);
  }
}

void End(SequenceWorld* world) {
  world->DeleteAll();
  world->ExpectAllAgree();
  world->ExpectEmpty();
}

}  // namespace

void SequenceWorker::Run(int steps) {
  for (; steps > 0 && !::testing::Test::HasFailure(); --steps) {
    world_.PassTime(&dice_);
    Step();
  }
}

void SequenceWorker::Step() {
  switch (dice_.Below(20)) {
    case 0:
    case 1:
      return world_.Create(&dice_);
    case 2:
    case 3:
      return Fork();
    case 4:
      return Truncate();
    case 5:
      return Describe();
    case 6:
      return world_.Delete(dice_.random());
    default:
      return SequenceBurst(&world_, &dice_).Run();
  }
}

void SequenceWorker::Fork() {
  const SequencePtr parent = world_.PickAny(dice_.random());
  if (parent == nullptr) return;
  const Locks locks = LockAllShared(*parent);
  const uint64_t shortest = Shortest(*parent);
  std::optional<uint64_t> length;
  if (dice_.OneIn(2)) length = dice_.Below(static_cast<uint32_t>(shortest) + 1);
  if (dice_.OneIn(8)) length = shortest + 1;
  world_.Fork(parent, length, &dice_, length > shortest);
}

void SequenceWorker::Truncate() {
  const SequencePtr sequence = world_.PickAny(dice_.random());
  if (sequence == nullptr) return;
  for (std::shared_mutex& lock : sequence->locks) lock.lock();
  const uint64_t shortest = Shortest(*sequence);
  const bool too_long = dice_.OneIn(8);
  const uint64_t length =
      too_long ? shortest + 1 : dice_.Below(static_cast<uint32_t>(shortest) + 1);
  std::optional<uint64_t> expected;
  if (dice_.OneIn(2)) expected = sequence->layers[0].length();
  const TimePoint now = world_.clock().Now();
  const auto info = world_.engine().sequences().Truncate(sequence->id, length, expected,
                                                         IdentityOf(sequence->client));
  if (info.ok()) {
    sequence->MarkUsed(now);
    for (ModelLayer& layer : sequence->layers) layer.Truncate(length);
    world_.ExpectAgrees(*sequence, *info);
  }
  world_.ExpectOutcome(info.status(), sequence, too_long);
  for (std::shared_mutex& lock : sequence->locks) lock.unlock();
}

void SequenceWorker::Describe() {
  const SequencePtr sequence = world_.PickAny(dice_.random());
  if (sequence == nullptr) return;
  const Locks locks = LockAllShared(*sequence);
  const auto info = world_.engine().sequences().Get(sequence->id, IdentityOf("alice"));
  if (info.ok()) world_.ExpectAgrees(*sequence, *info);
  world_.ExpectOutcome(info.status(), sequence, false);
  world_.Trespass(sequence, &dice_);
}

uint64_t SequenceWorker::Shortest(const ModelSequence& sequence) {
  const std::vector<uint64_t> lengths = sequence.lengths();
  return *std::min_element(lengths.begin(), lengths.end());
}

SequenceWorker::Locks SequenceWorker::LockAllShared(ModelSequence& sequence) {
  Locks locks;
  for (std::shared_mutex& lock : sequence.locks) locks.emplace_back(lock);
  return locks;
}

void ExpectAgreesWithTheModel(SequenceWorld* world, unsigned seed,
                              const std::function<bool()>& enough) {
  RunRounds(world, seed, StepsOfARound(5), /*rounds=*/1, enough);
  End(world);
}

void ExpectAgreesInEveryOutcome(SequenceWorld* world, unsigned seed,
                                const std::function<bool()>& enough, int rounds) {
  RunRounds(world, seed, StepsOfARound(80), rounds,
            [&] { return world->MissingOutcomes().empty() && (!enough || enough()); });
  EXPECT_THAT(world->MissingOutcomes(), ::testing::IsEmpty());
  End(world);
}

}  // namespace flashcore::server::testing
