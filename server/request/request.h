// A client's request to the server.
#ifndef FLASHCORE_SERVER_REQUEST_REQUEST_H_
#define FLASHCORE_SERVER_REQUEST_REQUEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention.h"
#include "server/memory/shared_region.h"
#include "server/request/sequence_id.h"
#include "server/request/timeline_point.h"

namespace flashcore::server {

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
  uint64_t bytes = 0;                          // of the tensor, as the client says
};

// The server's form of flashcore.v1.AttendRequest: the same fields, but of the tensors only their
// sizes and ranges. The transport parses both that message and LoadSequenceRequest (append_only)
// into it. Nothing in it can be trusted until ValidateAttend has passed.
struct AttendRequest {
  std::string request_id;
  std::vector<SpanShape> spans;
  kernels::DType dtype = kernels::DType::kFloat16;
  // The type of the sequences, which their lease sets; no client says it.
  kernels::KvDType kv_dtype = kernels::KvDType::kSameAsQuery;
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  Layout layout = Layout::kNhd;
  kernels::Terms terms;
  kernels::Precision precision = kernels::Precision::k16Bit;  // the least that it accepts
  bool return_lse = false;
  uint32_t layer = 0;
  uint64_t timeout_ns = 0;  // of a request of an AttendStream, from its arrival; 0: none
  // Appends K/V rows and attends to nothing: one span, no query rows.
  bool append_only = false;

  // Bytes of the inputs, in the message or in shared memory.
  size_t query_bytes = 0;
  size_t key_bytes = 0;
  size_t value_bytes = 0;
  std::array<MemoryRange, kNumTensors> ranges;

  TimelinePoint inputs_ready;   // when it begins
  TimelinePoint results_ready;  // that it raises when it has ended

  // Bytes of `rows` rows of `heads` heads; SIZE_MAX on overflow.
  size_t TensorBytes(int64_t rows, uint32_t heads) const;

  // FAILED_PRECONDITION if a part of the shared memory in `ranges` is gone.
  absl::Status CheckRegions() const;

  // The rest requires a validated request.
  //
  // Over K/V without kernels of other precision, requests share launches whatever they accept.
  kernels::Geometry geometry() const {
    return {dtype,
            static_cast<int32_t>(num_heads),
            static_cast<int32_t>(num_kv_heads),
            static_cast<int32_t>(head_dim),
            kv_dtype,
            kv_dtype == kernels::KvDType::kInt8 ? precision : kernels::Precision::k16Bit};
  }
  int64_t query_rows() const;  // of all spans
  int64_t kv_rows() const;     // of all spans
  size_t output_bytes() const { return query_bytes; }
  size_t lse_bytes() const {
    return return_lse ? static_cast<size_t>(query_rows()) * num_heads * sizeof(float) : 0;
  }
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_REQUEST_H_
