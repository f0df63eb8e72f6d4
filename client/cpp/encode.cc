#include "client/cpp/encode.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/support/slice.h"
#include "proto/wire/message.h"

namespace flashcore::client {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "tensors are little-endian in messages, and copied unchanged");

constexpr size_t kMaxVarintBytes = 10;

void FillMask(const Mask& mask, v1::Mask* out) {
  out->set_kind(mask.kind == Mask::Kind::kNone     ? v1::Mask::KIND_NONE
                : mask.kind == Mask::Kind::kCausal ? v1::Mask::KIND_CAUSAL
                                                   : v1::Mask::KIND_SLIDING_WINDOW);
  if (mask.left.has_value()) out->set_window_left(*mask.left);
  if (mask.right.has_value()) out->set_window_right(*mask.right);
}

void SetTerms(const AttendRequest& request, v1::AttendRequest* out) {
  const Mask& mask = request.mask;
  if (mask.kind != Mask::Kind::kNone || mask.left || mask.right) {
    FillMask(mask, out->mutable_mask());
  }
  if (request.softmax_scale.has_value()) out->set_softmax_scale(*request.softmax_scale);
}

// Adds the payload; without a copy if `borrowed` is given.
void AddField(int number, absl::Span<const std::byte> payload, const std::string& before,
              BorrowedMemory* borrowed, std::vector<grpc::Slice>* slices) {
  slices->emplace_back(before + wire::FieldHeader(number, payload.size()));
  if (payload.empty()) return;
  slices->push_back(borrowed != nullptr ? borrowed->Acquire(payload)
                                        : grpc::Slice(payload.data(), payload.size()));
}

}  // namespace

v1::Layout ToProto(Layout layout) {
  return layout == Layout::kNHD ? v1::LAYOUT_NHD : v1::LAYOUT_HND;
}

v1::DType ToProto(DType dtype) {
  return dtype == DType::kFloat16 ? v1::DTYPE_FLOAT16 : v1::DTYPE_BFLOAT16;
}

DType FromProto(v1::DType dtype) {
  return dtype == v1::DTYPE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
}

v1::KvDType ToProto(KvDType kv_dtype) {
  switch (kv_dtype) {
    case KvDType::kSameAsQuery:
      break;
    case KvDType::kInt8:
      return v1::KV_DTYPE_INT8;
    case KvDType::kFloat8E4M3:
      return v1::KV_DTYPE_FLOAT8_E4M3;
  }
  return v1::KV_DTYPE_SAME_AS_QUERY;
}

KvDType FromProto(v1::KvDType kv_dtype) {
  switch (kv_dtype) {
    case v1::KV_DTYPE_INT8:
      return KvDType::kInt8;
    case v1::KV_DTYPE_FLOAT8_E4M3:
      return KvDType::kFloat8E4M3;
    default:
      return KvDType::kSameAsQuery;
  }
}

v1::Precision ToProto(Precision precision) {
  switch (precision) {
    case Precision::k16Bit:
      break;
    case Precision::kInt8Qk:
      return v1::PRECISION_INT8_QK;
    case Precision::kInt8QkPv:
      return v1::PRECISION_INT8_QK_PV;
  }
  return v1::PRECISION_16BIT;
}

Precision FromProto(v1::Precision precision) {
  switch (precision) {
    case v1::PRECISION_INT8_QK:
      return Precision::kInt8Qk;
    case v1::PRECISION_INT8_QK_PV:
      return Precision::kInt8QkPv;
    default:
      return Precision::k16Bit;
  }
}

void SetSmallFields(const AttendRequest& request, v1::AttendRequest* out) {
  out->set_request_id(request.request_id);
  for (const SpanShape& span : request.spans) {
    v1::Span* to = out->add_spans();
    to->set_query_rows(span.query_rows);
    to->set_kv_rows(span.kv_rows);
    to->set_sequence_id(span.sequence_id);
    if (span.expected_length.has_value()) to->set_expected_length(*span.expected_length);
  }
  out->set_dtype(ToProto(request.dtype));
  out->set_num_heads(request.num_heads);
  out->set_num_kv_heads(request.num_kv_heads);
  out->set_head_dim(request.head_dim);
  out->set_layout(ToProto(request.layout));
  SetTerms(request, out);
  out->set_return_lse(!request.lse.empty());
  out->set_layer(request.layer);
  out->set_precision(ToProto(request.precision));
}

void SetDestination(const AttendRequest& request, Destination* out) {
  out->output = request.output;
  out->lse = request.lse;
  out->sequence_lengths.clear();
  const bool resident = std::any_of(request.spans.begin(), request.spans.end(),
                                    [](const SpanShape& s) { return !s.sequence_id.empty(); });
  if (!resident) return;
  for (const SpanShape& span : request.spans) {
    std::optional<uint64_t>& want = out->sequence_lengths.emplace_back();
    if (span.expected_length.has_value()) want = *span.expected_length + span.kv_rows;
    if (span.sequence_id.empty()) want = 0;
  }
}

absl::StatusOr<EncodedRequest> EncodeRequest(const AttendRequest& request, size_t max_message_bytes,
                                             BorrowedMemory* borrowed, uint64_t timeout_ns) {
  absl::Status status = CheckOnHost("query", request.query.data());
  status.Update(CheckOnHost("key", request.key.data()));
  status.Update(CheckOnHost("value", request.value.data()));
  status.Update(CheckOnHost("output", request.output.data()));
  status.Update(CheckOnHost("lse", request.lse.data()));
  if (!status.ok()) return status;
  v1::AttendRequest small;
  SetSmallFields(request, &small);
  small.set_timeout_ns(timeout_ns);
  EncodedRequest encoded;
  SetDestination(request, &encoded.destination);
  const size_t bytes = small.ByteSizeLong() + request.query.size() + request.key.size() +
                       request.value.size() + 3 * kMaxVarintBytes;
  if (bytes > max_message_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "request: about ", bytes, " bytes; a message may have at most ", max_message_bytes,
        " bytes (max_message_bytes of the client, --max_message_bytes of the server); load long "
        "K/V with Sequence::Append"));
  }
  std::vector<grpc::Slice> slices;
  slices.reserve(6);
  AddField(v1::AttendRequest::kQueryFieldNumber, request.query, small.SerializeAsString(), borrowed,
           &slices);
  AddField(v1::AttendRequest::kKeyFieldNumber, request.key, "", borrowed, &slices);
  AddField(v1::AttendRequest::kValueFieldNumber, request.value, "", borrowed, &slices);
  encoded.message = grpc::ByteBuffer(slices.data(), slices.size());
  return encoded;
}

}  // namespace flashcore::client
