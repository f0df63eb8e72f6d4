// One request on its way through the server: what was asked, its tensors, and how it ends.
#ifndef FLASHCORE_SERVER_REQUEST_REQUEST_H_
#define FLASHCORE_SERVER_REQUEST_REQUEST_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "server/base/clock.h"
#include "server/memory/shared_region.h"
#include "server/memory/staging_pool.h"
#include "server/request/order.h"
#include "server/request/sequence_lease.h"

namespace flashcore::server {

class Engine;  // engine.h

// Order of the axes of a span's tensors: [rows, heads, head_dim] or [heads, rows, head_dim].
enum class Layout : uint8_t { kNhd, kHnd };

// One sequence's share of a request, as the client describes it.
struct SpanShape {
  uint32_t query_rows = 0;
  uint32_t kv_rows = 0;     // inline rows to attend to, or rows to append to the sequence
  std::string sequence_id;  // empty: inline K/V
  std::optional<uint64_t> expected_length;
};

enum Tensor { kQuery, kKey, kValue, kOutput, kLse, kNumTensors };

// Where a tensor lies in a client's shared memory.
struct MemoryRange {
  std::shared_ptr<const SharedRegion> region;  // null: the tensor travels in messages
  uint64_t offset = 0;                         // bytes from the start of the region
};

// What a client asks, as it claims it: nothing holds until ValidateAttend has passed.
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
  // Appends K/V rows and attends nothing: a chunk of LoadSequence. One span, no query rows.
  bool append_only = false;

  // Bytes of the tensors that came with it. Of one in shared memory TensorBytes says them.
  size_t query_bytes = 0;
  size_t key_bytes = 0;
  size_t value_bytes = 0;
  std::array<MemoryRange, kNumTensors> ranges;

  // Of `rows` rows of `heads` heads of this request; SIZE_MAX if they are that many or more.
  size_t TensorBytes(int64_t rows, uint32_t heads) const;

  // FAILED_PRECONDITION if a part of the shared memory that it names is gone.
  absl::Status CheckRegions() const;

  // The rest holds for a validated request.
  kernels::Geometry geometry() const {
    return {dtype, static_cast<int32_t>(num_heads), static_cast<int32_t>(num_kv_heads),
            static_cast<int32_t>(head_dim)};
  }
  int64_t query_rows() const;  // of all spans
  int64_t kv_rows() const;     // likewise
  size_t output_bytes() const { return query_bytes; }
  size_t lse_bytes() const {
    return return_lse ? static_cast<size_t>(query_rows()) * num_heads * sizeof(float) : 0;
  }
};

// Where the time of one request went. Phases do not overlap.
struct PhaseTimes {
  Nanoseconds receive{0};       // parsing, validating and copying to staging memory
  Nanoseconds staging_wait{0};  // waiting for staging memory, between validating and copying
  Nanoseconds queue{0};         // waiting for a lane
  Nanoseconds copy_in{0};       // planning, and copying to the device
  Nanoseconds kernel{0};        // attention
  Nanoseconds copy_out{0};      // copying from the device
};

// Where the tensors of one request are, packed over its spans.
struct TensorAddresses {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  std::byte* output = nullptr;
  float* lse = nullptr;  // null: not wanted
};

// The tensors of one request on the host, each packed over its spans as the contract says: in
// staging memory, or in shared memory where the request has ranges. A device that copies them has
// one block for the inputs (query, key, value) and one for the results (output, LSE). So has
// staging memory, in which each tensor starts at a multiple of StagingPool::kAlignment.
class AttendTensors {
 public:
  // Bytes that lie on the host as they do in a block.
  struct Piece {
    std::byte* host;
    size_t offset;  // in the block
    size_t bytes;
  };
  using Pieces = absl::InlinedVector<Piece, 3>;

  // Takes staging memory for the tensors of `request` that are not in shared memory, which stays.
  // RESOURCE_EXHAUSTED if there is none now: claim() may then wait for it.
  absl::Status Allocate(const AttendRequest& request, StagingPool* pool);
  StagingClaim* claim() { return &claim_; }

  // Null if the tensor has no bytes.
  std::byte* query() const { return At(kQuery); }
  std::byte* key() const { return At(kKey); }
  std::byte* value() const { return At(kValue); }
  std::byte* output() const { return At(kOutput); }
  float* lse() const { return reinterpret_cast<float*>(At(kLse)); }
  TensorAddresses addresses() const { return {query(), key(), value(), output(), lse()}; }

  size_t lse_offset() const { return offsets_[kLse]; }   // in the block of results
  size_t input_bytes() const { return input_bytes_; }    // of their block
  size_t result_bytes() const { return result_bytes_; }  // likewise
  Pieces inputs() const { return PiecesOf(kQuery, kValue); }
  Pieces results() const { return PiecesOf(kOutput, kLse); }
  // Where the tensors are if their blocks are here.
  TensorAddresses InBlocks(std::byte* inputs, std::byte* results) const;
  bool in_reach() const { return in_reach_; }  // of kernels, on any device, where they are

  void ReleaseInputs() { claim_.inputs.Reset(); }
  StagingBuffer TakeResults() { return std::move(claim_.results); }

 private:
  // Places tensors [first, last] in a block. Returns its bytes, and in `*staged_bytes` those up to
  // the last tensor that is not in shared memory.
  size_t Place(const AttendRequest& request, Tensor first, Tensor last, size_t* staged_bytes);
  std::byte* At(Tensor tensor) const;
  Pieces PiecesOf(Tensor first, Tensor last) const;

  StagingClaim claim_;
  std::array<const SharedRegion*, kNumTensors> regions_ = {};  // null: in staging memory
  std::array<size_t, kNumTensors> region_offsets_ = {};
  std::array<size_t, kNumTensors> offsets_ = {};  // in their blocks
  std::array<size_t, kNumTensors> bytes_ = {};
  size_t input_bytes_ = 0;
  size_t result_bytes_ = 0;
  bool in_reach_ = true;
};

// A request in the engine. The submitter owns it and keeps it alive until `done` is called, which
// may destroy it.
struct AttendOperation {
  AttendRequest request;
  AttendTensors tensors;
  std::string client;  // who asks: for fairness among clients
  TimePoint deadline = kNoDeadline;
  // Set by the submitter, from any thread, when nobody waits for the answer any more. A queued
  // operation then ends with CANCELLED and is never launched.
  std::atomic<bool> cancelled{false};
  // Called exactly once if Engine::Submit returned OK, else never; on a thread of the engine, which
  // it must not block. With OK, output and lse are in place.
  absl::AnyInvocable<void(absl::Status)> done;

  PhaseTimes times;  // receive and staging_wait are the submitter's, the rest the engine's
  // Rows in the sequence of each span after its append, [spans], 0 for inline K/V; empty if all K/V
  // is inline. In place with OK.
  std::vector<uint64_t> sequence_lengths;

  Engine* engine = nullptr;  // where it goes, once the Fleet has prepared it

  // Of the engine.
  SequenceLease sequences;        // keeps what the spans name alive and from being evicted
  std::vector<OrderedUse> order;  // its place among the operations on the same sequences and layer
  TimePoint submitted;
  int64_t tokens = 0;  // what it counts for in a batch: its query rows, or rows to append if more
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_REQUEST_H_
