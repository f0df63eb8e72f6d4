#include "server/transport/rpc/convert.h"

#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

absl::Status ToMask(const v1::Mask& mask, kernels::Mask* out) {
  const bool has_window = mask.has_window_left() || mask.has_window_right();
  if (has_window && mask.kind() != v1::Mask::KIND_SLIDING_WINDOW) {
    return absl::InvalidArgumentError(
        "mask: window_left and window_right are only for KIND_SLIDING_WINDOW (2)");
  }
  *out = kernels::Mask::None();
  switch (mask.kind()) {
    case v1::Mask::KIND_SLIDING_WINDOW:
      if (mask.has_window_left()) out->left = mask.window_left();
      if (mask.has_window_right()) out->right = mask.window_right();
      return absl::OkStatus();
    case v1::Mask::KIND_NONE:
      return absl::OkStatus();
    case v1::Mask::KIND_CAUSAL:
      *out = kernels::Mask::Causal();
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("mask.kind: ", static_cast<int>(mask.kind()),
                       " is not KIND_NONE (0), KIND_CAUSAL (1) or KIND_SLIDING_WINDOW (2)"));
  }
}

absl::Status ParseTerms(const v1::AttendRequest& message, kernels::Terms* terms) {
  // head_dim may be 0 here; validation rejects it before the scale is used.
  terms->softmax_scale = message.has_softmax_scale()
                             ? message.softmax_scale()
                             : 1.0f / std::sqrt(static_cast<float>(message.head_dim()));
  return ToMask(message.mask(), &terms->mask);
}

absl::Status ToRange(const v1::MemoryRange& message, const char* field, const Regions* regions,
                     MemoryRange* range) {
  if (regions == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat(field, ": memory is shared over the local socket only (--local_listen)"));
  }
  const absl::StatusOr<Regions::Region> region = regions->Find(message.region_id());
  if (!region.ok()) {
    return WithMessage(region.status(), absl::StrCat(field, ": ", region.status().message()));
  }
  *range = {*region, message.offset(), message.bytes()};
  return absl::OkStatus();
}

absl::Status ToPoint(const v1::TimelinePoint& message, const char* field, const Regions* regions,
                     TimelinePoint* point) {
  v1::MemoryRange place;
  place.set_region_id(message.region_id());
  MemoryRange range;
  if (absl::Status status = ToRange(place, field, regions, &range); !status.ok()) return status;
  const auto invalid = [field](const auto&... args) {
    return absl::InvalidArgumentError(absl::StrCat(field, args...));
  };
  constexpr size_t kBytes = sizeof(TimelinePoint::Counter);
  const SharedRegion& region = *range.region;
  if (region.device() != SharedRegion::kHost) {
    return invalid(".region_id: the region is device memory; a counter is in host memory");
  }
  if (region.read_only()) return invalid(".region_id: the region is read_only");
  if (message.offset() % kBytes != 0 || message.offset() > region.bytes() - kBytes) {
    return invalid(".offset: ", message.offset(), " is not a multiple of ", kBytes, " in 0..",
                   region.bytes() - kBytes);
  }
  *point = {std::move(range.region), message.offset(), message.value()};
  return absl::OkStatus();
}

// Sets `*bytes`, the size of an input, if it is in shared memory.
absl::Status SetBytes(const MemoryRange& range, const char* field, size_t* bytes) {
  if (range.region == nullptr) return absl::OkStatus();
  if (*bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", *bytes, " bytes in the message, but ", field, "_range is set"));
  }
  *bytes = range.bytes;
  return absl::OkStatus();
}

template <typename Message>
absl::StatusOr<SequenceSettings> SettingsOf(const Message& message) {
  constexpr double kMinSeconds = 1, kMaxSeconds = 1e8;
  SequenceSettings settings;
  settings.pin = message.pin();
  settings.shared = message.shared();
  settings.group = message.group();
  const double seconds = message.idle_timeout_seconds();
  if (seconds != 0) {
    if (!(seconds >= kMinSeconds && seconds <= kMaxSeconds)) {  // also if it is NaN
      return absl::InvalidArgumentError(absl::StrCat("idle_timeout_seconds: ", seconds,
                                                     " is neither 0 nor in ", kMinSeconds, "..",
                                                     kMaxSeconds));
    }
    settings.idle_timeout =
        std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(seconds));
  }
  if (const std::string& lease = message.lease_id(); !lease.empty()) {
    settings.lease = LeaseId::FromBytes(lease);
    if (!settings.lease.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("lease_id: ", lease.size(), " bytes; an id has ", LeaseId::kBytes));
    }
  }
  return settings;
}

v1::DType FromDType(kernels::DType dtype) {
  return dtype == kernels::DType::kFloat16 ? v1::DTYPE_FLOAT16 : v1::DTYPE_BFLOAT16;
}

v1::KvDType FromKvDType(kernels::KvDType kv_dtype) {
  switch (kv_dtype) {
    case kernels::KvDType::kSameAsQuery:
      break;
    case kernels::KvDType::kInt8:
      return v1::KV_DTYPE_INT8;
    case kernels::KvDType::kFloat8E4M3:
      return v1::KV_DTYPE_FLOAT8_E4M3;
  }
  return v1::KV_DTYPE_SAME_AS_QUERY;
}

v1::Precision FromPrecision(kernels::Precision precision) {
  switch (precision) {
    case kernels::Precision::k16Bit:
      break;
    case kernels::Precision::kInt8Qk:
      return v1::PRECISION_INT8_QK;
    case kernels::Precision::kInt8QkPv:
      return v1::PRECISION_INT8_QK_PV;
  }
  return v1::PRECISION_16BIT;
}

absl::Status ToPrecision(v1::Precision precision, kernels::Precision* out) {
  switch (precision) {
    case v1::PRECISION_16BIT:
      *out = kernels::Precision::k16Bit;
      return absl::OkStatus();
    case v1::PRECISION_INT8_QK:
      *out = kernels::Precision::kInt8Qk;
      return absl::OkStatus();
    case v1::PRECISION_INT8_QK_PV:
      *out = kernels::Precision::kInt8QkPv;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "precision: ", static_cast<int>(precision),
          " is not PRECISION_16BIT (0), PRECISION_INT8_QK (1) or PRECISION_INT8_QK_PV (2)"));
  }
}

}  // namespace

absl::Status ToDType(v1::DType dtype, kernels::DType* out) {
  switch (dtype) {
    case v1::DTYPE_FLOAT16:
      *out = kernels::DType::kFloat16;
      return absl::OkStatus();
    case v1::DTYPE_BFLOAT16:
      *out = kernels::DType::kBFloat16;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "dtype: ", static_cast<int>(dtype), " is not DTYPE_FLOAT16 (1) or DTYPE_BFLOAT16 (2)"));
  }
}

absl::Status ToKvDType(v1::KvDType kv_dtype, kernels::KvDType* out) {
  switch (kv_dtype) {
    case v1::KV_DTYPE_SAME_AS_QUERY:
      *out = kernels::KvDType::kSameAsQuery;
      return absl::OkStatus();
    case v1::KV_DTYPE_INT8:
      *out = kernels::KvDType::kInt8;
      return absl::OkStatus();
    case v1::KV_DTYPE_FLOAT8_E4M3:
      *out = kernels::KvDType::kFloat8E4M3;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "kv_dtype: ", static_cast<int>(kv_dtype),
          " is not KV_DTYPE_SAME_AS_QUERY (0), KV_DTYPE_INT8 (1) or KV_DTYPE_FLOAT8_E4M3 (2)"));
  }
}

absl::Status ToLayout(v1::Layout layout, Layout* out) {
  switch (layout) {
    case v1::LAYOUT_NHD:
      *out = Layout::kNhd;
      return absl::OkStatus();
    case v1::LAYOUT_HND:
      *out = Layout::kHnd;
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat("layout: ", static_cast<int>(layout),
                                                     " is not LAYOUT_NHD (1) or LAYOUT_HND (2)"));
  }
}

absl::StatusOr<SequenceId> ToSequenceId(const std::string& bytes) {
  const std::optional<SequenceId> id = SequenceId::FromBytes(bytes);
  if (id.has_value()) return *id;
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id: ", bytes.size(), " bytes; an id has ", SequenceId::kBytes));
}

absl::StatusOr<SequenceSettings> ToSettings(const v1::CreateSequenceRequest& message) {
  return SettingsOf(message);
}

absl::StatusOr<SequenceSettings> ToSettings(const v1::ForkSequenceRequest& message) {
  return SettingsOf(message);
}

absl::Status ToRequest(const v1::AttendRequest& message, AttendRequest* request) {
  request->request_id = message.request_id();
  if (absl::Status status = ToDType(message.dtype(), &request->dtype); !status.ok()) return status;
  if (absl::Status status = ToLayout(message.layout(), &request->layout); !status.ok()) {
    return status;
  }
  if (absl::Status status = ParseTerms(message, &request->terms); !status.ok()) return status;
  if (absl::Status status = ToPrecision(message.precision(), &request->precision); !status.ok()) {
    return status;
  }
  request->num_heads = message.num_heads();
  request->num_kv_heads = message.num_kv_heads();
  request->head_dim = message.head_dim();
  request->layer = message.layer();
  request->timeout_ns = message.timeout_ns();
  request->return_lse = message.return_lse();
  request->spans.reserve(message.spans_size());
  for (const v1::Span& span : message.spans()) {
    SpanShape& shape = request->spans.emplace_back();
    shape.query_rows = span.query_rows();
    shape.kv_rows = span.kv_rows();
    shape.sequence_id = span.sequence_id();
    if (span.has_expected_length()) shape.expected_length = span.expected_length();
  }
  return absl::OkStatus();
}

absl::Status ToTimelinePoints(const v1::AttendRequest& message, const Regions* regions,
                              AttendRequest* request) {
  absl::Status status;
  if (message.has_results_ready()) {
    status = ToPoint(message.results_ready(), "results_ready", regions, &request->results_ready);
  }
  if (message.has_inputs_ready() && status.ok()) {
    status = ToPoint(message.inputs_ready(), "inputs_ready", regions, &request->inputs_ready);
  }
  return status;
}

absl::Status ToMemoryRanges(const v1::LoadSequenceRequest& message, const Regions* regions,
                            AttendRequest* request) {
  auto& ranges = request->ranges;
  absl::Status status;
  if (message.has_key_range()) {
    status = ToRange(message.key_range(), "key_range", regions, &ranges[kKey]);
  }
  if (message.has_value_range() && status.ok()) {
    status = ToRange(message.value_range(), "value_range", regions, &ranges[kValue]);
  }
  if (status.ok()) status = request->CheckRegions();
  if (!status.ok()) return status;
  status.Update(SetBytes(ranges[kKey], "key", &request->key_bytes));
  status.Update(SetBytes(ranges[kValue], "value", &request->value_bytes));
  return status;
}

absl::Status ToMemoryRanges(const v1::AttendRequest& message, const Regions* regions,
                            AttendRequest* request) {
  auto& ranges = request->ranges;
  absl::Status status;
  const auto read = [&](bool has, const v1::MemoryRange& range, const char* field, Tensor tensor) {
    if (has && status.ok()) status = ToRange(range, field, regions, &ranges[tensor]);
  };
  read(message.has_query_range(), message.query_range(), "query_range", kQuery);
  read(message.has_key_range(), message.key_range(), "key_range", kKey);
  read(message.has_value_range(), message.value_range(), "value_range", kValue);
  read(message.has_output_range(), message.output_range(), "output_range", kOutput);
  read(message.has_lse_range(), message.lse_range(), "lse_range", kLse);
  if (status.ok()) status = request->CheckRegions();
  if (!status.ok()) return status;
  status.Update(SetBytes(ranges[kQuery], "query", &request->query_bytes));
  status.Update(SetBytes(ranges[kKey], "key", &request->key_bytes));
  status.Update(SetBytes(ranges[kValue], "value", &request->value_bytes));
  return status;
}

v1::Status ToStatus(const absl::Status& status) {
  v1::Status message;
  message.set_code(static_cast<int>(status.code()));
  message.set_message(std::string(status.message()));
  if (const std::optional<ErrorInfo> info = GetErrorInfo(status); info.has_value()) {
    v1::ErrorInfo detail;
    detail.set_reason(info->reason);
    detail.set_domain("flashcore");
    for (const auto& [key, value] : info->metadata) (*detail.mutable_metadata())[key] = value;
    v1::StatusDetail* const any = message.add_details();
    any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
    detail.SerializeToString(any->mutable_value());
  }
  return message;
}

v1::Timing ToTiming(const PhaseTimes& times) {
  v1::Timing timing;
  timing.set_receive_ns(times.receive.count());
  timing.set_staging_wait_ns(times.staging_wait.count());
  timing.set_queue_ns(times.queue.count());
  timing.set_copy_in_ns(times.copy_in.count());
  timing.set_kernel_ns(times.kernel.count());
  timing.set_copy_out_ns(times.copy_out.count());
  return timing;
}

v1::SequenceInfo ToSequenceInfo(const SequenceInfo& info, const std::string& device_id) {
  v1::SequenceInfo message;
  message.set_sequence_id(info.id.ToBytes());
  message.set_num_layers(info.shape.num_layers);
  message.set_num_kv_heads(info.shape.num_kv_heads);
  message.set_head_dim(info.shape.head_dim);
  message.set_dtype(FromDType(info.shape.dtype));
  message.mutable_layer_lengths()->Reserve(static_cast<int>(info.layer_lengths.size()));
  for (const uint64_t length : info.layer_lengths) message.add_layer_lengths(length);
  message.set_kv_bytes(info.kv_bytes);
  message.set_pinned_bytes(info.hot_bytes);
  message.set_device_id(device_id);
  message.set_idle_seconds(Seconds(info.idle));
  message.set_pin(info.settings.pin);
  message.set_shared(info.settings.shared);
  message.set_group(info.settings.group);
  message.set_idle_timeout_seconds(Seconds(info.settings.idle_timeout.value_or(Nanoseconds(0))));
  message.set_leased(info.settings.lease.has_value());
  message.set_kv_dtype(FromKvDType(info.shape.kv_dtype));
  return message;
}

v1::DeviceInfo ToDeviceInfo(const DeviceInfo& info, const SequenceStore::Stats& kv) {
  v1::DeviceInfo message;
  message.set_id(info.id);
  message.set_name(info.name);
  message.set_arch(info.arch);
  message.set_memory_bytes(info.memory_bytes);
  message.set_l2_bytes(info.l2_bytes);
  message.set_l2_persisting_max_bytes(info.l2_persisting_max_bytes);
  message.set_l2_window_bytes(info.l2_window_bytes);
  message.set_l2_persisting_bytes(info.l2_persisting_bytes);
  message.set_l2_note(info.l2_note);
  message.set_lanes(info.lanes);
  message.set_compute_units(info.compute_units);
  message.set_kv_memory_bytes(kv.hot.capacity_bytes + kv.cold.capacity_bytes);
  message.set_kv_hot_bytes(kv.hot.capacity_bytes);
  message.set_kv_used_bytes(kv.hot.used_bytes + kv.cold.used_bytes);
  return message;
}

v1::KernelInfo ToKernelInfo(const kernels::KernelSpec& spec) {
  v1::KernelInfo message;
  message.set_arch(kernels::Name(spec.arch));
  message.set_dtype(FromDType(spec.dtype));
  message.set_head_dim(spec.head_dim);
  message.set_accumulate(kernels::Name(spec.accumulate));
  message.set_kv_dtype(FromKvDType(spec.kv_dtype));
  message.set_precision(FromPrecision(spec.precision));
  // Every kernel has these. Clients may look for them.
  for (const char* feature : {"paged_kv", "mask", "lse"}) message.add_features(feature);
  return message;
}

TimePoint ToDeadline(std::chrono::system_clock::time_point deadline, const Clock& clock) {
  if (deadline == std::chrono::system_clock::time_point::max()) return kNoDeadline;
  const auto left = deadline - std::chrono::system_clock::now();
  // Treat a deadline beyond this as none: the conversion would overflow.
  if (left > std::chrono::hours(24 * 365)) return kNoDeadline;
  return clock.Now() + std::chrono::duration_cast<Nanoseconds>(left);
}

TimePoint DeadlineIn(uint64_t timeout_ns, const Clock& clock) {
  return DeadlineAfter(clock.Now(), timeout_ns);
}

TimePoint DeadlineAfter(TimePoint start, uint64_t timeout_ns) {
  constexpr Nanoseconds kLongest = std::chrono::hours(24 * 365);  // beyond: none, as above
  if (timeout_ns == 0 || timeout_ns > static_cast<uint64_t>(kLongest.count())) return kNoDeadline;
  return start + Nanoseconds(timeout_ns);
}

}  // namespace flashcore::server
