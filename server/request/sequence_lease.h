// An operation's lease on the sequences that it names. kv/sequence_store.cc implements it.
#ifndef FLASHCORE_SERVER_REQUEST_SEQUENCE_LEASE_H_
#define FLASHCORE_SERVER_REQUEST_SEQUENCE_LEASE_H_

#include <memory>
#include <utility>
#include <vector>

namespace flashcore::server {

struct Sequence;      // sequence.h
class SequenceStore;  // sequence_store.h

// Protects sequences from idle expiry and eviction, and keeps their records alive, until it is
// reset or destroyed. A leased sequence can still be deleted by its client. Not thread-safe. Must
// not outlive the store.
class SequenceLease {
 public:
  SequenceLease() = default;
  SequenceLease(SequenceLease&& other) noexcept { *this = std::move(other); }
  SequenceLease& operator=(SequenceLease&& other) noexcept;
  ~SequenceLease() { Reset(); }

  void Reset();
  bool empty() const { return sequences_.empty(); }
  // [spans] of the operation, null for a span with inline K/V; empty if all K/V is inline.
  const std::vector<std::shared_ptr<Sequence>>& sequences() const { return sequences_; }

 private:
  friend class SequenceStore;
  SequenceStore* store_ = nullptr;
  std::vector<std::shared_ptr<Sequence>> sequences_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SEQUENCE_LEASE_H_
