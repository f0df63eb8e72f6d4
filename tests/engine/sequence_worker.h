// Threads that use the sequences of a SequenceWorld at random.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_WORKER_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_WORKER_H_

#include <cstdint>
#include <functional>
#include <shared_mutex>
#include <vector>

#include "tests/engine/sequence_world.h"

namespace flashcore::server::testing {

// The random operations of one thread.
class SequenceWorker {
 public:
  SequenceWorker(SequenceWorld* world, unsigned seed) : world_(*world), dice_{std::mt19937(seed)} {}
  void Run(int steps);

 private:
  using Locks = std::vector<std::shared_lock<std::shared_mutex>>;

  void Step();
  void Fork();
  void Truncate();
  void Describe();
  static uint64_t Shortest(const ModelSequence& sequence);
  static Locks LockAllShared(ModelSequence& sequence);

  SequenceWorld& world_;
  Dice dice_;
};

// Runs short rounds of workers and page moves, one or more until `enough` holds, if it is set, and
// compares everything after each. At the end no sequence is left. FLASHCORE_TEST_STEPS sets the
// steps of a worker in a round.
void ExpectAgreesWithTheModel(SequenceWorld* world, unsigned seed,
                              const std::function<bool()>& enough = nullptr);

// The same with long rounds, at least `rounds`, until every outcome that the test is about has
// happened. How often the memory is full, or a prefix is shared, depends on how the threads run.
void ExpectAgreesInEveryOutcome(SequenceWorld* world, unsigned seed,
                                const std::function<bool()>& enough = nullptr, int rounds = 6);

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_SEQUENCE_WORKER_H_
