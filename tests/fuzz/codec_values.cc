#include "tests/fuzz/codec_values.h"

#include <cmath>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "google/protobuf/descriptor.h"
#include "proto/grpc/message_view.h"
#include "server/kv/operation.h"
#include "server/memory/regions.h"
#include "server/transport/rpc/message.h"
#include "tests/fuzz/require.h"
#include "tests/memory/memfd.h"

namespace flashcore::fuzz {
namespace {

using ::google::protobuf::Descriptor;

// The memory of a connection of the local socket, with one region.
struct ServerMemory {
  server::Regions::Region region = server::testing::Memfd(4096).Map();
  server::Regions regions;
  std::string id = regions.Add(region);
};

const ServerMemory& Shared() {
  static const auto* const kShared = new ServerMemory;
  return *kShared;
}

void RequireFields(const Descriptor* message, const std::set<int>& known) {
  std::set<int> fields;
  for (int i = 0; i < message->field_count(); ++i) fields.insert(message->field(i)->number());
  Require(fields == known, message->full_name() + " has other fields than this file compares");
}

bool HasValue(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

bool IsWindow(const v1::Mask& mask) { return mask.kind() == v1::Mask::KIND_SLIDING_WINDOW; }

// Whether the request's values have a meaning, before anything is validated against limits.
bool HasMeaning(const v1::AttendRequest& request) {
  const auto range_ok = [](bool has, const v1::MemoryRange& range, const std::string& tensor) {
    return !has || (range.region_id() == Shared().id && tensor.empty());
  };
  const auto point_ok = [](bool has, const v1::TimelinePoint& point) {
    constexpr uint64_t kBytes = 8;  // of a counter
    return !has || (point.region_id() == Shared().id && point.offset() % kBytes == 0 &&
                    point.offset() <= Shared().region->bytes() - kBytes);
  };
  return HasKnownEnums(request) && (IsWindow(request.mask()) || !HasBound(request.mask())) &&
         range_ok(request.has_query_range(), request.query_range(), request.query()) &&
         range_ok(request.has_key_range(), request.key_range(), request.key()) &&
         range_ok(request.has_value_range(), request.value_range(), request.value()) &&
         range_ok(request.has_output_range(), request.output_range(), "") &&
         range_ok(request.has_lse_range(), request.lse_range(), "") &&
         point_ok(request.has_inputs_ready(), request.inputs_ready()) &&
         point_ok(request.has_results_ready(), request.results_ready());
}

// Checks what the request asks of attention, and clears it in `*want`.
void TakeTerms(const kernels::Terms& got, v1::AttendRequest* want) {
  kernels::Mask mask;
  if (want->mask().kind() == v1::Mask::KIND_CAUSAL) mask = kernels::Mask::Causal();
  if (want->mask().has_window_left()) mask.left = want->mask().window_left();
  if (want->mask().has_window_right()) mask.right = want->mask().window_right();
  Require(got.mask == mask, "mask");
  const float scale = want->has_softmax_scale()
                          ? want->softmax_scale()
                          : 1 / std::sqrt(static_cast<float>(want->head_dim()));
  Require(HasValue(got.softmax_scale, scale), "softmax_scale");
  want->clear_mask();
  want->clear_softmax_scale();
}

void AddRange(const server::MemoryRange& range, v1::MemoryRange* out) {
  Require(range.region == Shared().region, "region_id");
  out->set_region_id(Shared().id);
  out->set_offset(range.offset);
  out->set_bytes(range.bytes);
}

void AddPoint(const server::TimelinePoint& point, v1::TimelinePoint* out) {
  Require(point.region == Shared().region, "region_id of a point");
  out->set_region_id(Shared().id);
  out->set_offset(point.offset);
  out->set_value(point.value);
}

// For a name that is no id, only the number of bytes is kept.
std::string NameBytes(const server::SequenceName& name) {
  return name.is_id() ? name.id().ToBytes() : std::string(name.size(), '?');
}

// The message that `request` comes from, without tensors and terms.
v1::AttendRequest ToMessage(const server::AttendRequest& request) {
  v1::AttendRequest out;
  out.set_request_id(request.request_id);
  for (const server::SpanShape& span : request.spans) {
    v1::Span* to = out.add_spans();
    to->set_query_rows(span.query_rows);
    to->set_kv_rows(span.kv_rows);
    to->set_sequence_id(NameBytes(span.sequence_id));
    if (span.expected_length.has_value()) to->set_expected_length(*span.expected_length);
  }
  const bool half = request.dtype == kernels::DType::kFloat16;
  out.set_dtype(half ? v1::DTYPE_FLOAT16 : v1::DTYPE_BFLOAT16);
  out.set_num_heads(request.num_heads);
  out.set_num_kv_heads(request.num_kv_heads);
  out.set_head_dim(request.head_dim);
  out.set_layout(request.layout == server::Layout::kNhd ? v1::LAYOUT_NHD : v1::LAYOUT_HND);
  out.set_precision(static_cast<v1::Precision>(request.precision));
  out.set_return_lse(request.return_lse);
  out.set_layer(request.layer);
  out.set_timeout_ns(request.timeout_ns);
  const auto& ranges = request.ranges;
  if (ranges[server::kQuery].region) AddRange(ranges[server::kQuery], out.mutable_query_range());
  if (ranges[server::kKey].region) AddRange(ranges[server::kKey], out.mutable_key_range());
  if (ranges[server::kValue].region) AddRange(ranges[server::kValue], out.mutable_value_range());
  if (ranges[server::kOutput].region) AddRange(ranges[server::kOutput], out.mutable_output_range());
  if (ranges[server::kLse].region) AddRange(ranges[server::kLse], out.mutable_lse_range());
  if (request.inputs_ready.region) AddPoint(request.inputs_ready, out.mutable_inputs_ready());
  if (request.results_ready.region) AddPoint(request.results_ready, out.mutable_results_ready());
  return out;
}

// The bytes of the inputs: those of the message, or of the range if one is in shared memory.
void CheckInputBytes(const server::AttendRequest& got, const v1::AttendRequest& want) {
  const auto check = [](size_t bytes, bool shared, const v1::MemoryRange& range,
                        const std::string& tensor) {
    Require(bytes == (shared ? range.bytes() : tensor.size()), "bytes of an input");
  };
  check(got.query_bytes, want.has_query_range(), want.query_range(), want.query());
  check(got.key_bytes, want.has_key_range(), want.key_range(), want.key());
  check(got.value_bytes, want.has_value_range(), want.value_range(), want.value());
}

}  // namespace

bool HasBound(const v1::Mask& mask) { return mask.has_window_left() || mask.has_window_right(); }

bool HasKnownEnums(const v1::AttendRequest& request) {
  const auto in = [](int value, int low, int high) { return low <= value && value <= high; };
  return in(request.dtype(), 1, 2) && in(request.layout(), 1, 2) &&
         in(request.mask().kind(), 0, 2) && in(request.precision(), 0, 2);
}

void StartValueChecks() {
  Shared();
  RequireFields(v1::AttendRequest::descriptor(), {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 13,
                                                  14, 15, 32, 33, 34, 35, 36, 37, 38, 39, 40});
  RequireFields(v1::Span::descriptor(), {1, 2, 3, 4});
  RequireFields(v1::Mask::descriptor(), {1, 2, 3});
  RequireFields(v1::MemoryRange::descriptor(), {1, 2, 3});
  RequireFields(v1::TimelinePoint::descriptor(), {1, 2, 3});
  RequireFields(v1::AttendResponse::descriptor(), {1, 2, 3, 4, 5, 6});
  RequireFields(v1::Status::descriptor(), {1, 2, 3});
  RequireFields(v1::Timing::descriptor(), {1, 2, 3, 4, 5, 6});
}

std::string WithRegion(std::string bytes) {
  return absl::StrReplaceAll(bytes, {{kRegionInInputs, Shared().id}});
}

std::string Payload(const grpc::ByteBuffer& message, const wire::LargeField& field) {
  std::string payload(field.size, '\0');
  wire::CopyField(wire::ViewOf(message), field, payload.data());
  return payload;
}

std::string BytesOf(const grpc::ByteBuffer& message) {
  wire::LargeField all;
  all.size = message.Length();
  return Payload(message, all);
}

void CheckServerRequest(const grpc::ByteBuffer& message, bool known,
                        const v1::AttendRequest& parsed) {
  server::AttendOperation operation;
  server::TensorFields tensors;
  bool well_formed = false;
  const absl::Status status = server::ParseAttend(wire::ViewOf(message), &Shared().regions,
                                                  &operation, &tensors, &well_formed);
  Require(well_formed, "the server refuses a well-formed request");
  const server::AttendRequest& got = operation.request;
  Require(got.request_id == parsed.request_id(), "request_id");
  if (!known) return Require(absl::IsUnimplemented(status), "an unknown field");
  Require(status.ok() == HasMeaning(parsed), "a request without meaning: " + status.ToString());
  if (!status.ok()) return;
  Require(Payload(message, tensors[server::kQuery]) == parsed.query(), "query");
  Require(Payload(message, tensors[server::kKey]) == parsed.key(), "key");
  Require(Payload(message, tensors[server::kValue]) == parsed.value(), "value");
  CheckInputBytes(got, parsed);

  v1::AttendRequest want = parsed;
  want.DiscardUnknownFields();
  want.clear_query();
  want.clear_key();
  want.clear_value();
  TakeTerms(got.terms, &want);
  for (v1::Span& span : *want.mutable_spans()) {
    span.set_sequence_id(NameBytes(server::SequenceName(span.sequence_id())));
  }
  Require(ToMessage(got).SerializeAsString() == want.SerializeAsString(),
          "the server reads other values");
}

}  // namespace flashcore::fuzz
