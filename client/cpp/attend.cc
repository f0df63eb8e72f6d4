#include "flashcore/attend.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace flashcore {
namespace {

// No protobuf message is larger, so no tensor is.
constexpr uint64_t kMaxTensorBytes = std::numeric_limits<int32_t>::max();

uint64_t SumRows(const AttendRequest& request, uint32_t SpanShape::*rows) {
  uint64_t sum = 0;
  for (const SpanShape& span : request.spans) sum += span.*rows;
  return sum;
}

absl::Status CheckShape(const AttendRequest& request) {
  if (request.spans.empty()) return absl::InvalidArgumentError("spans: none; want at least 1");
  if (request.num_heads == 0 || request.num_kv_heads == 0 || request.head_dim == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_heads, num_kv_heads, head_dim: ", request.num_heads, ", ",
                     request.num_kv_heads, ", ", request.head_dim, "; each must be at least 1"));
  }
  if (request.num_heads % request.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("num_kv_heads: ", request.num_kv_heads,
                                                   "; must divide num_heads, ", request.num_heads));
  }
  for (size_t i = 0; i < request.spans.size(); ++i) {
    if (request.spans[i].query_rows == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("spans[", i, "].query_rows: 0; want at least 1"));
    }
  }
  // Rows and heads are 32 bits each, head_dim too: divide rather than multiply.
  const uint64_t row_limit = kMaxTensorBytes / kElementBytes / request.head_dim / request.num_heads;
  const uint64_t rows =
      std::max(SumRows(request, &SpanShape::query_rows), SumRows(request, &SpanShape::kv_rows));
  if (rows > row_limit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "spans: ", rows, " rows of ", request.num_heads, " heads of ", request.head_dim,
        " elements are over the ", kMaxTensorBytes, " bytes that a message can have"));
  }
  return absl::OkStatus();
}

absl::Status CheckTerms(const AttendRequest& request) {
  if (request.softmax_scale.has_value() && !std::isfinite(*request.softmax_scale)) {
    return absl::InvalidArgumentError("softmax_scale: not finite");
  }
  return absl::OkStatus();
}

absl::Status CheckSize(const char* field, const char* unit, size_t size, size_t want) {
  if (size == want) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", size, " ", unit, "; the shapes of the request make it ", want));
}

}  // namespace

size_t AttendRequest::QueryBytes() const { return LseElements() * head_dim * kElementBytes; }

size_t AttendRequest::KvBytes() const {
  return SumRows(*this, &SpanShape::kv_rows) * num_kv_heads * head_dim * kElementBytes;
}

size_t AttendRequest::LseElements() const {
  return SumRows(*this, &SpanShape::query_rows) * num_heads;
}

bool AttendRequest::SafeToRepeat() const {
  for (const SpanShape& span : spans) {
    if (!span.sequence_id.empty() && !span.expected_length.has_value()) return false;
  }
  return true;
}

absl::Status CheckRequest(const AttendRequest& request) {
  if (absl::Status status = CheckShape(request); !status.ok()) return status;
  const size_t query_bytes = request.QueryBytes();
  const size_t kv_bytes = request.KvBytes();
  absl::Status status = CheckSize("query", "bytes", request.query.size(), query_bytes);
  status.Update(CheckSize("key", "bytes", request.key.size(), kv_bytes));
  status.Update(CheckSize("value", "bytes", request.value.size(), kv_bytes));
  status.Update(CheckSize("output", "bytes", request.output.size(), query_bytes));
  if (!request.lse.empty()) {
    status.Update(CheckSize("lse", "elements", request.lse.size(), request.LseElements()));
  }
  status.Update(CheckTerms(request));
  return status;
}

}  // namespace flashcore
