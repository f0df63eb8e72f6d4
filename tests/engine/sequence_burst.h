// Several requests at once on some sequences of a SequenceWorld.
#ifndef FLASHCORE_TESTS_ENGINE_SEQUENCE_BURST_H_
#define FLASHCORE_TESTS_ENGINE_SEQUENCE_BURST_H_

#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "server/kv/operation.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/sequence_world.h"

namespace flashcore::server::testing {

// Holds the locks of one layer of some sequences of one shape: exclusively where it may append,
// shared where it only reads. It submits requests without waiting for earlier ones, so it knows the
// order in which they arrive. It updates the model in the same order, by how each request ended.
// Not thread-safe; many bursts run at once.
class SequenceBurst {
 public:
  SequenceBurst(SequenceWorld* world, Dice* dice);  // picks the sequences
  void Run();

 private:
  struct Member {
    SequencePtr sequence;
    std::shared_lock<std::shared_mutex> to_read;
    std::unique_lock<std::shared_mutex> to_write;
    uint64_t length = 0;  // of the layer, if all requests in flight succeed

    bool writes() const { return to_write.owns_lock(); }
  };

  // A submitted request.
  struct Flight {
    std::unique_ptr<AttendJob> job;
    std::vector<SequencePtr> sequences;  // [spans], null: inline K/V
    bool expired = false;                // its deadline has passed before it was queued
    bool may_expire = false;             // its deadline passes soon
    TimePoint submitted;
  };

  void Submit();
  // Until the engine has staging memory for it.
  absl::Status Admit(Flight* flight);
  // Expects that `status`, of a request that was not admitted, is no surprise. `wrong`: what is
  // wrong with the request, or OK.
  void ExpectRefusal(const Flight& flight, const absl::Status& status, absl::StatusCode wrong);
  // A valid request on some of the sequences, in any order, and sometimes with inline K/V.
  Flight MakeFlight();
  static bool Appends(const Member& member, const std::string& client);
  SpanShape ResidentSpan(const Member& member, const std::string& client, bool append_only);
  // Makes a request invalid. Returns the status with which it must be refused.
  absl::StatusCode Spoil(AttendOperation* operation);
  void ExpectOneIsGone(const Flight& flight);
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
