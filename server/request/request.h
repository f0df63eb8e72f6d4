// One request on its way through the server: what it asks, where its tensors are, how it ends.
#ifndef FLASHCORE_SERVER_REQUEST_REQUEST_H_
#define FLASHCORE_SERVER_REQUEST_REQUEST_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "server/base/clock.h"
#include "server/memory/shared_region.h"
#include "server/memory/staging_pool.h"
#include "server/request/identity.h"
#include "server/request/order.h"
#include "server/request/sequence_id.h"

namespace flashcore::server {

struct CutLaunch;     // engine/cut_launch.h
struct Sequence;      // kv/sequence.h
class SequenceStore;  // kv/sequence_store.h

// ---- What the client asks.

// Order of the axes of a span's tensors: [rows, heads, head_dim] or [heads, rows, head_dim].
enum class Layout : uint8_t { kNhd, kHnd };

// One sequence's share of a request, as the client describes it.
struct SpanShape {
  uint32_t query_rows = 0;
  uint32_t kv_rows = 0;      // inline rows to attend to, or rows to append to the sequence
  SequenceName sequence_id;  // empty: inline K/V
  std::optional<uint64_t> expected_length;
};

enum Tensor { kQuery, kKey, kValue, kOutput, kLse, kNumTensors };

// The place of a tensor in a client's shared memory.
struct MemoryRange {
  std::shared_ptr<const SharedRegion> region;  // null: the tensor travels in messages
  uint64_t offset = 0;                         // bytes from the start of the region
};

// The server's form of flashcore.v1.AttendRequest: the same fields, but of the tensors only their
// sizes and ranges. The transport parses both that message and LoadSequenceRequest (append_only)
// into it. Nothing in it can be trusted until ValidateAttend has passed.
struct AttendRequest {
  std::string request_id;
  std::vector<SpanShape> spans;
  kernels::DType dtype = kernels::DType::kFloat16;
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  Layout layout = Layout::kNhd;
  kernels::Mask mask;
  float softmax_scale = 0;
  bool return_lse = false;
  uint32_t layer = 0;
  // Appends K/V rows and attends to nothing: one span, no query rows.
  bool append_only = false;

  // Bytes of the inputs that came in the message. For a tensor in shared memory: TensorBytes of its
  // shape.
  size_t query_bytes = 0;
  size_t key_bytes = 0;
  size_t value_bytes = 0;
  std::array<MemoryRange, kNumTensors> ranges;

  // Bytes of `rows` rows of `heads` heads; SIZE_MAX on overflow.
  size_t TensorBytes(int64_t rows, uint32_t heads) const;

  // FAILED_PRECONDITION if a part of the shared memory in `ranges` is gone.
  absl::Status CheckRegions() const;

  // The rest requires a validated request.
  kernels::Geometry geometry() const {
    return {dtype, static_cast<int32_t>(num_heads), static_cast<int32_t>(num_kv_heads),
            static_cast<int32_t>(head_dim)};
  }
  int64_t query_rows() const;  // of all spans
  int64_t kv_rows() const;     // of all spans
  size_t output_bytes() const { return query_bytes; }
  size_t lse_bytes() const {
    return return_lse ? static_cast<size_t>(query_rows()) * num_heads * sizeof(float) : 0;
  }
};

// ---- Where its tensors are.

// The start of each tensor. A tensor holds all spans, one after the other.
struct TensorAddresses {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  std::byte* output = nullptr;
  float* lse = nullptr;  // null: not requested
};

// The tensors of one request on the host: each in staging memory, or in shared memory if the
// request has a range for it.
//
// A device that copies them has one block for the inputs (query, key, value) and one for the
// results (output, LSE). Staging memory has the same blocks, with every tensor aligned to
// StagingPool::kAlignment.
class AttendTensors {
 public:
  // Bytes with the same layout on the host and in a block.
  struct Piece {
    const SharedRegion* region;  // that the host's side lies in; null: staging memory
    std::byte* host;
    size_t offset;  // in the block
    size_t bytes;
  };
  using Pieces = absl::InlinedVector<Piece, 3>;

  // Acquires staging memory for the tensors of `request` that are not in shared memory.
  // RESOURCE_EXHAUSTED if there is none now: claim() may then wait for it.
  absl::Status Allocate(const AttendRequest& request, StagingPool* pool);
  StagingClaim* claim() { return &claim_; }

  // Null if the tensor has no bytes.
  std::byte* query() const { return At(kQuery); }
  std::byte* key() const { return At(kKey); }
  std::byte* value() const { return At(kValue); }
  std::byte* output() const { return At(kOutput); }
  float* lse() const { return reinterpret_cast<float*>(At(kLse)); }
  const SharedRegion* region(Tensor tensor) const { return regions_[tensor]; }  // null: staging
  TensorAddresses addresses() const { return {query(), key(), value(), output(), lse()}; }

  size_t lse_offset() const { return offsets_[kLse]; }   // in the result block
  size_t input_bytes() const { return input_bytes_; }    // of the input block
  size_t result_bytes() const { return result_bytes_; }  // of the result block
  Pieces inputs() const { return PiecesOf(kQuery, kValue); }
  Pieces results() const { return PiecesOf(kOutput, kLse); }
  // The tensors' addresses in blocks that start at `inputs` and `results`.
  TensorAddresses InBlocks(std::byte* inputs, std::byte* results) const;
  bool in_reach() const { return in_reach_; }  // kernels of every device can access them in place

  void ReleaseInputs() { claim_.inputs.Reset(); }
  StagingBuffer TakeResults() { return std::move(claim_.results); }

 private:
  // Lays out tensors [first, last] in a block. Returns the block's bytes, and in `*staged_bytes`
  // those up to the end of the last tensor that is not in shared memory.
  size_t LayOut(const AttendRequest& request, Tensor first, Tensor last, size_t* staged_bytes);
  std::byte* At(Tensor tensor) const;
  Pieces PiecesOf(Tensor first, Tensor last) const;

  StagingClaim claim_;
  std::array<const SharedRegion*, kNumTensors> regions_ = {};  // null: in staging memory
  std::array<size_t, kNumTensors> region_offsets_ = {};
  std::array<size_t, kNumTensors> offsets_ = {};  // in the blocks
  std::array<size_t, kNumTensors> bytes_ = {};
  size_t input_bytes_ = 0;
  size_t result_bytes_ = 0;
  bool in_reach_ = true;
};

// ---- Its way through the engine.

// Where the time of one request went. Phases do not overlap.
struct PhaseTimes {
  Nanoseconds receive{0};       // parsing, validation, copying to staging memory
  Nanoseconds staging_wait{0};  // waiting for staging memory
  Nanoseconds queue{0};         // waiting for a lane
  Nanoseconds copy_in{0};       // planning, copying to the device
  Nanoseconds kernel{0};        // attention
  Nanoseconds copy_out{0};      // copying from the device
};

// An operation's lease on the sequences that it names; kv/sequence_store.cc implements it. Protects
// sequences from idle expiry and eviction, and keeps their records alive, until it is
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

// A request in the engine. Its submitter owns it, and keeps it until `done` is called, which may
// destroy it.
struct AttendOperation {
  // Set by the submitter before Admit.
  AttendRequest request;
  Identity identity;
  TimePoint deadline = kNoDeadline;
  int rpc = 0;  // that it counts to in the metrics of devices (DeviceMetrics::PhaseSeconds)
  // Called exactly once if Engine::Enqueue returned OK, else never. Runs on a thread of the engine
  // or of Engine::EndAll's caller, which it must not block. With OK, output and LSE are written.
  absl::AnyInvocable<void(absl::Status)> done;

  // The client is gone. A wait for staging memory ends, and a queued operation is never launched:
  // both with CANCELLED. From any thread.
  void Cancel() {
    cancelled = true;
    staging_wait.Cancel();
  }
  std::atomic<bool> cancelled{false};

  // Results.
  PhaseTimes times;  // `receive` is the transport's, the others are the engine's
  // Rows in the sequence of each span after its append, [spans], 0 for inline K/V; empty if all K/V
  // is inline. Set with OK.
  std::vector<uint64_t> sequence_lengths;

  // Set by Admit.
  size_t device = 0;        // index in the fleet
  SequenceLease sequences;  // protects the sequences that the spans name from eviction
  AttendTensors tensors;    // the submitter fills the inputs before Enqueue
  StagingWait staging_wait;

  // Set by the queue.
  std::vector<OrderedUse> order;  // among the operations on the same layers of the same sequences
  TimePoint submitted;
  int64_t tokens = 0;   // query rows, or rows to append if there are more
  Nanoseconds work{0};  // estimated time on the device; if `cut`, what is left of it

  // Set by the engine: its launch has begun, is executed in parts, and has not ended.
  std::shared_ptr<CutLaunch> cut;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_REQUEST_H_
