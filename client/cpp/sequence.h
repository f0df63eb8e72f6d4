// A resident sequence: K/V that stays on the server. What the operations mean, and the order in
// which they take effect, are in proto/flashcore/v1/attention.proto.
//
//   auto sequence = client->CreateSequence({num_layers, num_kv_heads, head_dim});
//   sequence->Append(/*layer=*/0, key, value, Layout::kNHD, /*expected_length=*/0);  // the prompt
//   request.spans = {{/*query_rows=*/1, /*kv_rows=*/1, {}, /*expected_length=*/prompt_rows}};
//   sequence->Attend(request, &result);  // one decode step: appends a row, attends to all
//   sequence->Delete();
//
// Behind a proxy that spreads sequences over servers, a sequence's affinity says which one has it:
// SequenceOptions::affinity. What a server that went had can be loaded again: Sequence::OnLost.
#ifndef FLASHCORE_CLIENT_CPP_SEQUENCE_H_
#define FLASHCORE_CLIENT_CPP_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/attend.h"
#include "client/cpp/options.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

namespace client {
class Connection;
}

struct SequenceOptions {
  uint32_t num_layers = 1;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  bool pin = false;  // ask that its K/V be kept in the pinned part of the L2 cache
  // DeviceInfo.id of the device to live on; empty: the server chooses. Sequences of one request
  // must live on one device. Sequence::options() has the one that it is.
  std::string device_id;
  // What every operation of it and of its forks gives as CallOptions::affinity; empty: a random
  // one. Sequences of one request must have the same, to be on one server.
  std::string affinity;
};

// A handle: the id of a sequence, its shape and the connection it lives on. Cheap to copy; copies
// name the same sequence, also after it was reloaded. Its destructor sends nothing: a sequence
// stays until Delete, or until nobody has used it for limits.sequence_idle_timeout_seconds.
// Thread-safe; may outlive its Client.
//
// Every operation is NOT_FOUND once the sequence has gone, unless OnLost says how to get it back.
// As RetryPolicy says, UNAVAILABLE is tried again where that cannot do harm: Truncate, Delete,
// Info, and Attend if expected_length is given. Append and Fork are sent once.
class Sequence {
 public:
  static constexpr size_t kIdBytes = 16;
  // Of one message of Append at most, unless a row alone has more. What every gRPC server accepts
  // by default, and small enough to be taken in while the next is on its way.
  static constexpr size_t kMessageBytes = size_t{4} << 20;

  // Makes a sequence with the K/V that the lost one had, as far as the caller knows of it, on this
  // server or another; returns its handle. `options` are those of the lost one, on any device.
  using Reload = std::function<absl::StatusOr<Sequence>(const SequenceOptions& options)>;

  // From now on, an operation that ends with NOT_FOUND, Delete excepted, calls `reload`, lets this
  // handle and its copies name what it made, and runs once more, within its deadline. Should
  // `reload` fail, the operation ends with its status. It runs on the thread of the operation, one
  // at a time, must not use this handle or its copies, and is dropped by Delete. Forks have none.
  // Requests of Client and of AttendStream never call it: if one of these is NOT_FOUND, Info does.
  void OnLost(Reload reload);

  std::string id() const;  // kIdBytes bytes; another one after a reload
  SequenceOptions options() const;

  // Bytes of one row of `key`, or of `value`, in one layer.
  size_t RowBytes() const;

  // Appends rows to a layer without attending: as many as `key` and `value` have, at least 1, in
  // the order of axes that `layout` says. They travel in messages that take effect one by one, and
  // memory for a few of them is taken, however many there are; the deadline is of all together. If
  // it fails, some of the rows may be there: Info says how many. With expected_length,
  // FAILED_PRECONDITION unless the layer has that many rows before. INVALID_ARGUMENT, nothing sent,
  // for byte counts that are no whole rows.
  absl::StatusOr<v1::SequenceInfo> Append(uint32_t layer, absl::Span<const std::byte> key,
                                          absl::Span<const std::byte> value, Layout layout,
                                          std::optional<uint64_t> expected_length = std::nullopt,
                                          const CallOptions& call = {}) const;

  // Client::Attend of a request of one span on this sequence: its sequence_id, num_kv_heads,
  // head_dim and dtype are filled in. The server appends the span's K/V rows and then attends to
  // the whole sequence.
  absl::Status Attend(AttendRequest request, AttendResult* result,
                      const CallOptions& call = {}) const;

  // A new sequence with the first `length` rows of every layer (unset: all), which share memory
  // until they are written. If the answer is lost, see Client::CreateSequence.
  absl::StatusOr<Sequence> Fork(std::optional<uint64_t> length = std::nullopt, bool pin = false,
                                const CallOptions& call = {}) const;

  // Keeps the first `length` rows of every layer. With expected_length, FAILED_PRECONDITION unless
  // layer 0 has that many rows before.
  absl::StatusOr<v1::SequenceInfo> Truncate(uint64_t length,
                                            std::optional<uint64_t> expected_length = std::nullopt,
                                            const CallOptions& call = {}) const;

  // The sequence is not reloaded any more. If it was sent again, because the first answer was lost,
  // NOT_FOUND counts as success.
  absl::Status Delete(const CallOptions& call = {}) const;

  absl::StatusOr<v1::SequenceInfo> Info(const CallOptions& call = {}) const;

 private:
  friend class Client;
  using ConnectionPtr = std::shared_ptr<const client::Connection>;
  struct Resident;
  struct State;
  Sequence(ConnectionPtr connection, std::string id, const SequenceOptions& options);

  static absl::StatusOr<Sequence> Create(ConnectionPtr connection, SequenceOptions options,
                                         const CallOptions& call);
  static absl::StatusOr<Sequence> Open(ConnectionPtr connection, absl::string_view id,
                                       const CallOptions& call);
  std::shared_ptr<const Resident> resident() const;
  template <typename Operation>
  auto WithReload(const CallOptions& call, Operation operation) const;
  absl::StatusOr<std::shared_ptr<const Resident>> ReloadLost(
      const std::shared_ptr<const Resident>& lost, const absl::Status& not_found) const;

  std::shared_ptr<State> state_;  // of all copies
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_SEQUENCE_H_
