#include "server/request/validate.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/kernel.h"
#include "server/request/sequence_id.h"

namespace flashcore::server {
namespace {

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

absl::Status ValidateRequestId(const std::string& id) {
  if (id.size() > kMaxRequestIdBytes) {
    return Invalid("request_id: ", id.size(), " bytes; at most ", kMaxRequestIdBytes,
                   " are allowed");
  }
  if (!std::all_of(id.begin(), id.end(), [](unsigned char c) { return absl::ascii_isprint(c); })) {
    return Invalid("request_id: contains a character that is not printable ASCII");
  }
  return absl::OkStatus();
}

absl::Status ValidateHeads(const AttendRequest& request, const RequestLimits& limits) {
  if (request.num_heads < 1 || request.num_heads > limits.max_heads) {
    return Invalid("num_heads: ", request.num_heads, " is not in 1..", limits.max_heads);
  }
  if (request.num_kv_heads < 1 || request.num_kv_heads > request.num_heads) {
    return Invalid("num_kv_heads: ", request.num_kv_heads, " is not in 1..num_heads, which is ",
                   request.num_heads);
  }
  if (request.num_heads % request.num_kv_heads != 0) {
    return Invalid("num_kv_heads: ", request.num_kv_heads, " does not divide num_heads, which is ",
                   request.num_heads);
  }
  if (std::find(limits.head_dims.begin(), limits.head_dims.end(), request.head_dim) ==
      limits.head_dims.end()) {
    return Invalid("head_dim: ", request.head_dim, " is not one of ",
                   absl::StrJoin(limits.head_dims, ", "));
  }
  return absl::OkStatus();
}

absl::Status ValidateTerms(const kernels::Terms& terms) {
  if (terms.mask.left < 0) {
    return Invalid("mask.window_left: ", terms.mask.left, " is negative; unset means unbounded");
  }
  if (terms.mask.right < 0) {
    return Invalid("mask.window_right: ", terms.mask.right, " is negative; unset means unbounded");
  }
  if (!std::isfinite(terms.softmax_scale)) {
    return Invalid("softmax_scale: ", terms.softmax_scale, " is not finite");
  }
  return absl::OkStatus();
}

absl::Status ValidateSpan(const AttendRequest& request, size_t index) {
  const SpanShape& span = request.spans[index];
  const auto field = [&](const char* name) { return absl::StrCat("spans[", index, "].", name); };
  if (span.query_rows < 1 && !request.append_only) {
    return Invalid(field("query_rows"), ": 0; at least 1 is needed");
  }
  if (!span.sequence_id.empty() && !span.sequence_id.is_id()) {
    return Invalid(field("sequence_id"), ": ", span.sequence_id.size(), " bytes; an id has ",
                   SequenceId::kBytes);
  }
  if (span.sequence_id.empty() && span.expected_length.has_value()) {
    return Invalid(field("expected_length"), ": is set, but the span names no sequence");
  }
  return absl::OkStatus();
}

// INVALID_ARGUMENT unless `bytes` is the size of a [rows, heads, head_dim] tensor.
absl::Status ValidateTensor(Tensor tensor, const char* name, uint64_t rows, uint32_t heads,
                            const AttendRequest& request, size_t bytes) {
  const size_t want = request.TensorBytes(static_cast<int64_t>(rows), heads);
  const bool overflow = want == SIZE_MAX;
  if (!overflow && want == bytes) return absl::OkStatus();
  const bool shared = request.ranges[tensor].region != nullptr;
  return Invalid(name, shared ? "_range.bytes: " : ": ", bytes,
                 shared ? ", but " : " bytes came, but ", rows, " rows of ", heads, " heads of ",
                 request.head_dim, " elements need ",
                 overflow ? "more than 2^64" : absl::StrCat(want));
}

absl::Status ValidateRange(const AttendRequest& request, Tensor tensor, const char* name,
                           size_t bytes) {
  const MemoryRange& range = request.ranges[tensor];
  if (range.region == nullptr) return absl::OkStatus();
  if (range.bytes != bytes) {
    return Invalid(name, ".bytes: ", range.bytes, ", but the tensor has ", bytes);
  }
  if (range.offset % SharedRegion::kAlignment != 0) {
    return Invalid(name, ".offset: ", range.offset, " is not a multiple of ",
                   SharedRegion::kAlignment);
  }
  const size_t region_bytes = range.region->bytes();
  if (bytes > region_bytes || range.offset > region_bytes - bytes) {
    return Invalid(name, ".offset: ", range.offset, ", and the tensor has ", bytes,
                   " bytes; the region has ", region_bytes);
  }
  if (tensor >= kOutput && range.region->read_only()) {
    return Invalid(name, ": the region is read_only");
  }
  return absl::OkStatus();
}

// Requires that ValidateTensor has passed for every input.
absl::Status ValidateRanges(const AttendRequest& request) {
  if (request.ranges[kLse].region != nullptr && !request.return_lse) {
    return Invalid("lse_range: is set, but return_lse is not");
  }
  absl::Status status = ValidateRange(request, kQuery, "query_range", request.query_bytes);
  status.Update(ValidateRange(request, kKey, "key_range", request.key_bytes));
  status.Update(ValidateRange(request, kValue, "value_range", request.value_bytes));
  status.Update(ValidateRange(request, kOutput, "output_range", request.output_bytes()));
  status.Update(ValidateRange(request, kLse, "lse_range", request.lse_bytes()));
  return status;
}

}  // namespace

absl::Status ValidateDType(kernels::DType dtype, const std::vector<kernels::DType>& supported) {
  if (std::find(supported.begin(), supported.end(), dtype) != supported.end()) {
    return absl::OkStatus();
  }
  const auto name = [](std::string* out, kernels::DType each) { *out += kernels::Name(each); };
  return Invalid("dtype: ", kernels::Name(dtype), " is not one of ",
                 absl::StrJoin(supported, ", ", name));
}

absl::Status ValidateAttend(const AttendRequest& request, const RequestLimits& limits) {
  if (absl::Status status = ValidateRequestId(request.request_id); !status.ok()) return status;
  if (absl::Status status = ValidateDType(request.dtype, limits.dtypes); !status.ok()) {
    return status;
  }
  if (absl::Status status = ValidateHeads(request, limits); !status.ok()) return status;
  if (absl::Status status = ValidateTerms(request.terms); !status.ok()) return status;
  if (request.spans.empty() || request.spans.size() > limits.max_spans) {
    return Invalid("spans: ", request.spans.size(), " came; 1..", limits.max_spans, " are allowed");
  }
  uint64_t query_rows = 0;
  uint64_t kv_rows = 0;
  bool all_inline = true;
  for (size_t i = 0; i < request.spans.size(); ++i) {
    if (absl::Status status = ValidateSpan(request, i); !status.ok()) return status;
    query_rows += request.spans[i].query_rows;
    kv_rows += request.spans[i].kv_rows;
    all_inline = all_inline && request.spans[i].sequence_id.empty();
  }
  if (all_inline && request.layer != 0) {
    return Invalid("layer: ", request.layer, "; must be 0 when all K/V is inline");
  }
  absl::Status status =
      ValidateTensor(kQuery, "query", query_rows, request.num_heads, request, request.query_bytes);
  status.Update(
      ValidateTensor(kKey, "key", kv_rows, request.num_kv_heads, request, request.key_bytes));
  status.Update(
      ValidateTensor(kValue, "value", kv_rows, request.num_kv_heads, request, request.value_bytes));
  if (status.ok()) status = ValidateRanges(request);
  if (status.ok() && all_inline) status = ValidateWork(request, {}, limits.max_flop);
  return status;
}

// In floating point, which cannot overflow here and is exact enough.
absl::Status ValidateWork(const AttendRequest& request,
                          const std::vector<uint64_t>& sequence_lengths, double max_flop) {
  double pairs = 0;  // of query and K/V rows
  for (size_t i = 0; i < request.spans.size(); ++i) {
    const double resident = sequence_lengths.empty() ? 0 : static_cast<double>(sequence_lengths[i]);
    pairs += request.spans[i].query_rows * (resident + request.spans[i].kv_rows);
  }
  const double flop = 4 * pairs * request.num_heads * request.head_dim;
  if (flop <= max_flop) return absl::OkStatus();
  return Invalid("spans: together they need ", flop, " floating-point operations; at most ",
                 max_flop, " are allowed in one request");
}

}  // namespace flashcore::server
