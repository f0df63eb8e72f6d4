// A resident sequence: K/V that stays on the server. proto/flashcore/v1/attention.proto defines the
// operations and the order in which they take effect. client/README.md has an example.
//
// Behind a proxy in front of several servers, a sequence's affinity selects its server:
// SequenceOptions::affinity. To load lost sequences again, see Sequence::OnLost.
#ifndef FLASHCORE_SEQUENCE_H_
#define FLASHCORE_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "flashcore/attend.h"
#include "flashcore/options.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

namespace client {
class Connection;
}

// A field that an initialiser leaves out has its default, without a warning (-Wextra).
struct SequenceOptions {
  uint32_t num_layers = 1;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  KvDType kv_dtype = KvDType::kSameAsQuery;  // forks have it too
  bool pin = false;                          // ask for a place in the pinned part of the L2 cache
  // DeviceInfo.id of its device; empty: the server chooses. Sequences of one request must be on the
  // same device. Sequence::options() has the actual one.
  std::string device_id = {};
  // CallOptions::affinity of every operation on it and on its forks; empty: a random one. Sequences
  // of one request need the same affinity, so that they are on one server.
  std::string affinity = {};
  // The other clients that may read and fork it, if they know its id: every client, or the members
  // of a group of this client. Only this client changes it.
  bool shared = false;
  std::string group = {};
  // The server deletes it when nobody has used it for so long, so that the sequences of a killed
  // client do not stay. At least a second and at most limits.sequence_idle_timeout_seconds; 0: that
  // limit.
  absl::Duration idle_timeout = {};
};

// Options of a fork. Nothing is inherited from the parent.
struct ForkOptions {
  std::optional<uint64_t> length;  // rows of every layer; unset: all
  // As in SequenceOptions.
  bool pin = false;
  bool shared = false;
  std::string group = {};
  absl::Duration idle_timeout = {};
};

// A handle: the id of a sequence, its shape and its connection. Cheap to copy; copies refer to the
// same sequence, also after a reload. The destructor sends nothing: a sequence exists until Delete,
// or until nobody has used it for its idle_timeout. Thread-safe; may outlive its Client.
//
// Operations on a lost sequence are NOT_FOUND, unless OnLost tells how to load it again.
// UNAVAILABLE is retried as RetryPolicy says: for Truncate, Delete, Info, and Attend with
// expected_length. Append and Fork are sent once.
class Sequence {
 public:
  static constexpr size_t kIdBytes = 16;
  // Most bytes of one message of Append, unless a single row has more. Every gRPC server accepts
  // this by default, and can process one message while it receives the next.
  static constexpr size_t kMessageBytes = size_t{4} << 20;

  // Creates a sequence with the K/V of the lost one, as far as the caller has it, on this server or
  // another. `options` are those of the lost one, without a device.
  using Reload = std::function<absl::StatusOr<Sequence>(const SequenceOptions& options)>;

  // From now on, an operation other than Delete that ends with NOT_FOUND, because the sequence is
  // lost, calls `reload`, lets this handle and its copies refer to the new sequence, and runs once
  // more within its deadline. If `reload` fails, the operation ends with its status. `reload` runs
  // on the thread of the operation, one at a time, and must not use this handle or its copies.
  // Delete drops it, and forks do not have it. Requests of Client and of AttendStream never call
  // it: after a NOT_FOUND from one of these, call Info.
  void OnLost(Reload reload);

  std::string id() const;  // kIdBytes bytes; changes with a reload
  SequenceOptions options() const;

  // Bytes of one row of `key`, or of `value`, in one layer.
  size_t RowBytes() const;

  // Appends all rows of `key` and `value`, at least 1, to a layer without attending. `layout` is
  // their order of axes. They are sent in messages that take effect one by one, with memory for
  // only a few messages at a time; the deadline covers all of them. After an error some of the rows
  // may have been appended: Info tells how many. With expected_length, FAILED_PRECONDITION unless
  // the layer has that many rows before. INVALID_ARGUMENT, and nothing is sent, if the byte counts
  // are not whole rows, or if they are on a GPU: rows there are appended by an Attend.
  absl::StatusOr<v1::SequenceInfo> Append(uint32_t layer, absl::Span<const std::byte> key,
                                          absl::Span<const std::byte> value, Layout layout,
                                          std::optional<uint64_t> expected_length = std::nullopt,
                                          const CallOptions& call = {}) const;

  // Client::Attend of a request of one span on this sequence: its sequence_id, num_kv_heads,
  // head_dim and dtype are filled in. The server appends the span's K/V rows and then attends to
  // the whole sequence.
  absl::Status Attend(AttendRequest request, AttendResult* result,
                      const CallOptions& call = {}) const;

  // A new sequence with the first `length` rows of every layer (unset: all). It shares their memory
  // until either is written. If the reply is lost, see Client::CreateSequence.
  absl::StatusOr<Sequence> Fork(std::optional<uint64_t> length = std::nullopt, bool pin = false,
                                const CallOptions& call = {}) const;
  // The fork belongs to this client, whoever the parent belongs to.
  absl::StatusOr<Sequence> Fork(const ForkOptions& options, const CallOptions& call = {}) const;

  // Keeps the first `length` rows of every layer. With expected_length, FAILED_PRECONDITION unless
  // layer 0 has that many rows before; or has `length` rows, after an attempt whose answer was
  // lost.
  absl::StatusOr<v1::SequenceInfo> Truncate(uint64_t length,
                                            std::optional<uint64_t> expected_length = std::nullopt,
                                            const CallOptions& call = {}) const;

  // Also drops the callback of OnLost. After a retry NOT_FOUND counts as success: the first attempt
  // may have taken effect.
  absl::Status Delete(const CallOptions& call = {}) const;

  absl::StatusOr<v1::SequenceInfo> Info(const CallOptions& call = {}) const;

 private:
  friend class Client;
  friend class SequenceOperation;
  using ConnectionPtr = std::shared_ptr<const client::Connection>;
  struct Resident;
  struct State;
  Sequence(ConnectionPtr connection, std::string id, const SequenceOptions& options);

  static absl::StatusOr<Sequence> Create(ConnectionPtr connection, SequenceOptions options,
                                         const CallOptions& call);
  static absl::StatusOr<Sequence> Open(ConnectionPtr connection, absl::string_view id,
                                       const CallOptions& call);
  absl::Status CheckProcess() const;
  std::shared_ptr<const Resident> resident() const;
  template <typename Operation>
  auto WithReload(const CallOptions& call, Operation operation) const;
  absl::StatusOr<std::shared_ptr<const Resident>> ReloadLost(
      const std::shared_ptr<const Resident>& lost, const absl::Status& not_found) const;

  std::shared_ptr<State> state_;  // of all copies
};

// One operation of Client::ManageSequences. Each is as the call that its comment names, on the
// sequence that the handle refers to now, and uses no OnLost.
class SequenceOperation {
 public:
  static SequenceOperation Create(const SequenceOptions& options);  // Client::CreateSequence
  static SequenceOperation Fork(const Sequence& parent,             // Sequence::Fork
                                const ForkOptions& options = {});
  static SequenceOperation Truncate(const Sequence& sequence, uint64_t length,
                                    std::optional<uint64_t> expected_length = std::nullopt);
  static SequenceOperation Delete(const Sequence& sequence);  // drops the callback of OnLost
  static SequenceOperation Info(const Sequence& sequence);

 private:
  friend class Client;
  SequenceOperation() = default;
  explicit SequenceOperation(const Sequence& sequence)
      : options_(sequence.options()), sequence_(sequence) {}

  bool MakesSequence() const { return message_.has_create() || message_.has_fork(); }
  struct SequenceResult ToResult(const Sequence::ConnectionPtr& connection,
                                 v1::SequenceResult reply, int attempts,
                                 const CallOptions& call) const;

  v1::SequenceOperation message_;
  SequenceOptions options_;           // of the sequence that it creates, or that it is on
  std::optional<Sequence> sequence_;  // that it is on; none: Create
};

struct SequenceResult {
  // After Create and Fork the new sequence, otherwise the one that the operation was on; or why it
  // failed.
  absl::StatusOr<Sequence> sequence;
  v1::SequenceInfo info;  // of that sequence after the operation; empty after Delete
};

}  // namespace flashcore

#endif  // FLASHCORE_SEQUENCE_H_
