// Several requests at once on some sequences of a SequenceWorld.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_BURST_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_BURST_H_

#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "tests/engine/attend_job.h"
#include "tests/engine/sequence_world.h"

namespace flashcore::server::testing {

// Holds the locks of one layer of some sequences of one shape: to itself where it may append,
// together with other bursts where it only reads. It submits requests without waiting for those
// before, and so knows in which order they arrive. How they end decides what becomes of the model,
// again in that order. Not thread-safe; many run at once.
class SequenceBurst {
 public:
  SequenceBurst(SequenceWorld* world, Dice* dice);  // picks the sequences
  void Run();

 private:
  struct Member {
    SequencePtr sequence;
    std::shared_lock<std::shared_mutex> to_read;
    std::unique_lock<std::shared_mutex> to_write;
    uint64_t length = 0;  // of the layer, if all that is in flight succeeds

    bool writes() const { return to_write.owns_lock(); }
  };

  // A request on its way.
  struct Flight {
    std::unique_ptr<AttendJob> job;
    std::vector<SequencePtr> sequences;  // [spans], null: inline K/V
    bool expired = false;                // its deadline
  };

  void Submit();
  // A valid request on some of the sequences, in any order, and perhaps inline K/V.
  Flight MakeFlight();
  SpanShape ResidentSpan(const Member& member, bool append_only);
  // Makes a request one that is refused at once; says with what.
  absl::StatusCode Spoil(AttendRequest* request);
  void ForkWhileRequestsRun();
  void SettleOldest();
  bool MayEnd(const Flight& flight, absl::StatusCode code) const;
  void ApplyAndCompare(const Flight& flight);
  Member& FindMember(const SequencePtr& sequence);

  SequenceWorld* const world_;
  Dice* const dice_;
  uint32_t layer_ = 0;
  std::vector<Member> members_;
  std::deque<Flight> flights_;  // submitted and not settled, oldest first
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_SEQUENCE_BURST_H_
