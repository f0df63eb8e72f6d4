// One request on its way through the server: what was asked, its tensors, and how it ends.
#ifndef FLASHCORE_SERVER_CORE_REQUEST_H_
#define FLASHCORE_SERVER_CORE_REQUEST_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kernels/attention.h"
#include "server/core/clock.h"
#include "server/core/order.h"
#include "server/core/sequence_lease.h"
#include "server/core/staging_pool.h"

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

  // Bytes of the tensors that came with it.
  size_t query_bytes = 0;
  size_t key_bytes = 0;
  size_t value_bytes = 0;

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

// The tensors of one request in staging memory, packed over its spans as the contract says. Each
// tensor starts at a multiple of StagingPool::kAlignment.
class AttendTensors {
 public:
  // Takes memory for the tensors of `request`. RESOURCE_EXHAUSTED if there is none now: claim() may
  // then wait for it.
  absl::Status Allocate(const AttendRequest& request, StagingPool* pool);
  StagingClaim* claim() { return &claim_; }

  std::byte* query() const { return claim_.inputs.data(); }
  std::byte* key() const { return query() + key_offset_; }
  std::byte* value() const { return query() + value_offset_; }
  std::byte* output() const { return claim_.results.data(); }
  float* lse() const {  // null if not asked for
    return lse_offset_ == 0 ? nullptr : reinterpret_cast<float*>(output() + lse_offset_);
  }
  size_t lse_offset() const { return lse_offset_; }            // bytes after output()
  size_t input_bytes() const { return claim_.input_bytes; }    // from query(), K and V included
  size_t result_bytes() const { return claim_.result_bytes; }  // from output(), LSE included
  TensorAddresses addresses() const { return {query(), key(), value(), output(), lse()}; }

  void ReleaseInputs() { claim_.inputs.Reset(); }
  StagingBuffer TakeResults() { return std::move(claim_.results); }

 private:
  StagingClaim claim_;  // inputs: query, key, value; results: output, LSE
  size_t key_offset_ = 0;
  size_t value_offset_ = 0;
  size_t lse_offset_ = 0;
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

#endif  // FLASHCORE_SERVER_CORE_REQUEST_H_
