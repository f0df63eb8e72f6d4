// Resident sequences of known content, for a load.
#ifndef FLASHCORE_CLIENT_CLI_RESIDENT_CONTEXT_H_
#define FLASHCORE_CLIENT_CLI_RESIDENT_CONTEXT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/row_source.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// Of one layer, all of it loaded from a RowSource in pieces, so that no context is ever in memory.
struct ContextShape {
  SequenceOptions sequence;
  Layout layout = Layout::kNHD;  // in which rows are sent
};

// The sequence that others are forked from. Thread-safe.
class SharedPrefix {
 public:
  static constexpr uint64_t kSeed = 0;

  // `client` outlives this. Talks to the server when the first fork is asked for.
  SharedPrefix(Client* client, const ContextShape& shape, uint64_t rows);

  uint64_t rows() const { return rows_; }

  // A fork on the connection of `client`. Loads the prefix if the server does not have it, or has
  // it no more; meanwhile others wait.
  absl::StatusOr<Sequence> Fork(Client* client) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Status Delete() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // An error if there is no such sequence (any more).
  absl::StatusOr<Sequence> TryFork(Client* client) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Client* const client_;
  const ContextShape shape_;
  const uint64_t rows_;
  absl::Mutex mutex_;
  std::optional<Sequence> sequence_ ABSL_GUARDED_BY(mutex_);
};

// One sequence. Used by one thread.
class ResidentContext {
 public:
  // `prefix` is null if the sequence has none. Pointers outlive this.
  ResidentContext(Client* client, SharedPrefix* prefix, const ContextShape& shape, uint64_t seed);

  // Makes the sequence `rows` rows long, whatever became of it: asks the server for its length,
  // creates it on `device_id` (empty: anywhere) or forks it if it is gone, drops or loads rows. May
  // be called again after an error.
  absl::Status Restore(uint64_t rows, const std::string& device_id);

  // Drops the rows from `rows` on of the `expected_length` that it has.
  absl::Status Truncate(uint64_t rows, uint64_t expected_length);

  // OK if it is gone already.
  absl::Status Delete();

  // After a Restore that was OK.
  std::string id() const { return sequence_->id(); }
  std::string device_id() const { return sequence_->options().device_id; }
  const RowSource& source() const { return source_; }

 private:
  absl::StatusOr<uint64_t> Length() const;
  absl::Status Create(const std::string& device_id);

  Client* const client_;
  SharedPrefix* const prefix_;
  const ContextShape shape_;
  const RowSource source_;
  std::optional<Sequence> sequence_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_RESIDENT_CONTEXT_H_
