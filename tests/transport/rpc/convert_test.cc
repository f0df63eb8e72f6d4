// The server's types against attention.proto, by protobuf's descriptors: a field or an enum value
// that the contract has and the conversions leave out fails here. tests/client/contract_test.cc
// does the same for the client.
#include "server/transport/rpc/convert.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "proto/wire/message.h"
#include "server/base/error_info.h"
#include "server/kv/operation.h"
#include "server/transport/rpc/message.h"
#include "tests/base/fake_clock.h"

namespace flashcore::server {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::testing::IsEmpty;

// The fields of its type that `message` does not have.
std::vector<std::string> MissingFields(const google::protobuf::Message& message) {
  std::vector<std::string> missing;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    const auto* reflection = message.GetReflection();
    const bool present = field->is_repeated() ? reflection->FieldSize(message, field) > 0
                                              : reflection->HasField(message, field);
    if (!present) missing.push_back(field->full_name());
  }
  return missing;
}

TEST(ConvertTest, EveryPhaseIsInTiming) {
  PhaseTimes times;
  times.receive = Nanoseconds(1);
  times.staging_wait = Nanoseconds(2);
  times.queue = Nanoseconds(3);
  times.copy_in = Nanoseconds(4);
  times.kernel = Nanoseconds(5);
  times.copy_out = Nanoseconds(6);
  const v1::Timing timing = ToTiming(times);
  EXPECT_THAT(MissingFields(timing), IsEmpty());
  EXPECT_EQ(sizeof(PhaseTimes) / sizeof(Nanoseconds),
            static_cast<size_t>(v1::Timing::descriptor()->field_count()));
  EXPECT_EQ(timing.receive_ns(), 1u);
  EXPECT_EQ(timing.staging_wait_ns(), 2u);
  EXPECT_EQ(timing.queue_ns(), 3u);
  EXPECT_EQ(timing.copy_in_ns(), 4u);
  EXPECT_EQ(timing.kernel_ns(), 5u);
  EXPECT_EQ(timing.copy_out_ns(), 6u);
}

TEST(ConvertTest, AStatusHasItsErrorInfoAsADetail) {
  const v1::Status status =
      ToStatus(WithInfo(absl::ResourceExhaustedError("full"), reason::kTooLarge,
                        {{"needed_bytes", 20}, {"limit_bytes", 10}}));
  EXPECT_EQ(status.code(), 8);
  EXPECT_EQ(status.message(), "full");
  ASSERT_EQ(status.details_size(), 1);
  EXPECT_EQ(status.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(status.details(0).value()));
  EXPECT_EQ(info.reason(), "TOO_LARGE");
  EXPECT_EQ(info.domain(), "flashcore");
  EXPECT_EQ(info.metadata().size(), 2u);
  EXPECT_EQ(info.metadata().at("needed_bytes"), "20");
  EXPECT_EQ(info.metadata().at("limit_bytes"), "10");
  EXPECT_EQ(ToStatus(absl::InternalError("a bug")).details_size(), 0);
}

TEST(ConvertTest, AnErrorInASlotHasTheInfoIfItTakesAtMostHalf) {
  const std::string text(1000, 'x');
  const absl::Status error = WithInfo(absl::ResourceExhaustedError(text), reason::kQueueFull);
  v1::AttendResponse response;
  for (const size_t slot : {size_t{240}, size_t{1008}}) {
    std::string bytes;
    WriteError("id", error, slot, &bytes);
    EXPECT_LE(bytes.size(), slot);
    ASSERT_TRUE(response.ParseFromString(bytes));
    EXPECT_EQ(response.status().details_size(), 1) << slot;
  }
  std::string bytes;
  WriteError(std::string(64, 'i'), error, 240, &bytes);
  EXPECT_LE(bytes.size(), 240u);
  ASSERT_TRUE(response.ParseFromString(bytes));
  EXPECT_EQ(response.status().details_size(), 0);
  EXPECT_EQ(response.status().message(), text.substr(0, response.status().message().size()));
  EXPECT_GT(response.status().message().size(), 100u);
}

TEST(ConvertTest, EveryFieldOfTheInfosIsSet) {
  DeviceInfo device;
  device.id = device.name = device.arch = device.l2_note = "x";
  device.memory_bytes = device.l2_bytes = device.l2_persisting_max_bytes = 1;
  device.l2_window_bytes = device.l2_persisting_bytes = 1;
  device.lanes = device.compute_units = 1;
  SequenceStore::Stats stats;
  stats.hot = stats.cold = {/*used_bytes=*/1, /*capacity_bytes=*/2};
  EXPECT_THAT(MissingFields(ToDeviceInfo(device, stats)), IsEmpty());

  SequenceInfo sequence;
  sequence.id = SequenceId::Random();
  sequence.shape = {/*num_layers=*/1, /*num_kv_heads=*/1, /*head_dim=*/64,
                    kernels::DType::kBFloat16, kernels::KvDType::kInt8};
  sequence.layer_lengths = {1};
  sequence.kv_bytes = sequence.hot_bytes = 1;
  sequence.settings = {/*pin=*/true, /*shared=*/true, "a group", std::chrono::seconds(9),
                       LeaseId::Random()};
  sequence.idle = Nanoseconds(1);
  EXPECT_THAT(MissingFields(ToSequenceInfo(sequence, "cpu")), IsEmpty());

  kernels::KernelSpec spec;
  spec.head_dim = 64;
  spec.kv_dtype = kernels::KvDType::kInt8;
  spec.precision = kernels::Precision::kInt8Qk;
  EXPECT_THAT(MissingFields(ToKernelInfo(spec)), IsEmpty());
}

// A field of AttendRequest, Span or Mask is read if some request shows it.
TEST(ConvertTest, EveryFieldOfARequestIsRead) {
  using Set = std::function<void(v1::AttendRequest*)>;
  using Shows = std::function<bool(const AttendRequest&)>;
  // By full name without the package: sets the field, and whether the result shows it.
  const std::map<std::string, std::pair<Set, Shows>> fields = {
      {"AttendRequest.request_id",
       {[](auto* m) { m->set_request_id("r"); }, [](auto& r) { return r.request_id == "r"; }}},
      {"AttendRequest.spans",
       {[](auto* m) { m->add_spans(); }, [](auto& r) { return r.spans.size() == 2; }}},
      {"AttendRequest.dtype",
       {[](auto* m) { m->set_dtype(v1::DTYPE_BFLOAT16); },
        [](auto& r) { return r.dtype == kernels::DType::kBFloat16; }}},
      {"AttendRequest.num_heads",
       {[](auto* m) { m->set_num_heads(7); }, [](auto& r) { return r.num_heads == 7; }}},
      {"AttendRequest.num_kv_heads",
       {[](auto* m) { m->set_num_kv_heads(7); }, [](auto& r) { return r.num_kv_heads == 7; }}},
      {"AttendRequest.head_dim",
       {[](auto* m) { m->set_head_dim(7); }, [](auto& r) { return r.head_dim == 7; }}},
      {"AttendRequest.layout",
       {[](auto* m) { m->set_layout(v1::LAYOUT_HND); },
        [](auto& r) { return r.layout == Layout::kHnd; }}},
      {"AttendRequest.mask",
       {[](auto* m) { m->mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL); },
        [](auto& r) { return r.terms.mask.right == 0; }}},
      {"AttendRequest.softmax_scale",
       {[](auto* m) { m->set_softmax_scale(7); },
        [](auto& r) { return r.terms.softmax_scale == 7; }}},
      {"AttendRequest.precision",
       {[](auto* m) { m->set_precision(v1::PRECISION_INT8_QK); },
        [](auto& r) { return r.precision == kernels::Precision::kInt8Qk; }}},
      {"AttendRequest.return_lse",
       {[](auto* m) { m->set_return_lse(true); }, [](auto& r) { return r.return_lse; }}},
      {"AttendRequest.layer",
       {[](auto* m) { m->set_layer(7); }, [](auto& r) { return r.layer == 7; }}},
      {"AttendRequest.timeout_ns",
       {[](auto* m) { m->set_timeout_ns(7); }, [](auto& r) { return r.timeout_ns == 7; }}},
      {"Span.query_rows",
       {[](auto* m) { m->mutable_spans(0)->set_query_rows(7); },
        [](auto& r) { return r.spans[0].query_rows == 7; }}},
      {"Span.kv_rows",
       {[](auto* m) { m->mutable_spans(0)->set_kv_rows(7); },
        [](auto& r) { return r.spans[0].kv_rows == 7; }}},
      {"Span.sequence_id",
       {[](auto* m) { m->mutable_spans(0)->set_sequence_id("sixteen bytes id"); },
        [](auto& r) { return r.spans[0].sequence_id.id().ToBytes() == "sixteen bytes id"; }}},
      {"Span.expected_length",
       {[](auto* m) { m->mutable_spans(0)->set_expected_length(7); },
        [](auto& r) { return r.spans[0].expected_length == uint64_t{7}; }}},
      {"Mask.kind",
       {[](auto* m) { m->mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL); },
        [](auto& r) { return r.terms.mask.right == 0; }}},
      {"Mask.window_left",
       {[](auto* m) {
          m->mutable_mask()->set_kind(v1::Mask::KIND_SLIDING_WINDOW);
          m->mutable_mask()->set_window_left(7);
        },
        [](auto& r) { return r.terms.mask.left == 7; }}},
      {"Mask.window_right",
       {[](auto* m) {
          m->mutable_mask()->set_kind(v1::Mask::KIND_SLIDING_WINDOW);
          m->mutable_mask()->set_window_right(7);
        },
        [](auto& r) { return r.terms.mask.right == 7; }}},
  };
  v1::AttendRequest plain;
  plain.set_dtype(v1::DTYPE_FLOAT16);
  plain.set_layout(v1::LAYOUT_NHD);
  plain.add_spans();
  for (const auto& [name, field] : fields) {
    v1::AttendRequest message = plain;
    field.first(&message);
    AttendRequest before, after;
    ASSERT_TRUE(ToRequest(plain, &before).ok());
    ASSERT_TRUE(ToRequest(message, &after).ok()) << name;
    EXPECT_FALSE(field.second(before)) << name;
    EXPECT_TRUE(field.second(after)) << name;
  }
  // `query`, `key` and `value` never reach the generated class, and local_test covers the ranges
  // and points.
  for (const auto* type :
       {v1::AttendRequest::descriptor(), v1::Span::descriptor(), v1::Mask::descriptor()}) {
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor& field = *type->field(i);
      const bool is_tensor =
          field.type() == FieldDescriptor::TYPE_BYTES && type == v1::AttendRequest::descriptor();
      const bool is_range = field.message_type() == v1::MemoryRange::descriptor() ||
                            field.message_type() == v1::TimelinePoint::descriptor();
      const std::string name = type->name() + "." + field.name();
      EXPECT_TRUE(is_tensor || is_range || fields.count(name) == 1) << name << " is not read";
    }
  }
}

// Every message within an AttendRequest, also one that is new.
TEST(ConvertTest, UnknownFieldsOfEveryMessageInARequestAreFound) {
  const auto* type = v1::AttendRequest::descriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* const field = type->field(i);
    if (field->message_type() == nullptr) continue;
    v1::AttendRequest message;
    auto* const part = field->is_repeated()
                           ? message.GetReflection()->AddMessage(&message, field)
                           : message.GetReflection()->MutableMessage(&message, field);
    part->GetReflection()->MutableUnknownFields(part)->AddVarint(99, 1);
    const std::string bytes = message.SerializeAsString();
    AttendOperation operation;
    TensorFields tensors;
    bool well_formed = false;
    const absl::Status status = ParseAttend(wire::MessageView(bytes), /*regions=*/nullptr,
                                            &operation, &tensors, &well_formed);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << field->name();
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("field 99 of " + field->message_type()->full_name()));
    EXPECT_TRUE(well_formed);
  }
}

// The bounds of a window are independent: each may be unset, which means unbounded.
TEST(ConvertTest, TheBoundsOfAWindowKeepTheirSides) {
  using Bound = std::optional<int32_t>;
  for (const Bound left : {Bound(), Bound(0), Bound(5)}) {
    for (const Bound right : {Bound(), Bound(0), Bound(9)}) {
      v1::AttendRequest message;
      message.set_dtype(v1::DTYPE_FLOAT16);
      message.set_layout(v1::LAYOUT_NHD);
      message.set_head_dim(64);
      v1::Mask* mask = message.mutable_mask();
      mask->set_kind(v1::Mask::KIND_SLIDING_WINDOW);
      if (left.has_value()) mask->set_window_left(*left);
      if (right.has_value()) mask->set_window_right(*right);
      AttendRequest request;
      ASSERT_TRUE(ToRequest(message, &request).ok());
      constexpr int32_t kUnbounded = kernels::Mask::kUnbounded;
      const kernels::Mask want{left.value_or(kUnbounded), right.value_or(kUnbounded)};
      EXPECT_EQ(request.terms, (kernels::Terms{want, /*softmax_scale=*/0.125f}));
    }
  }
}

TEST(ConvertTest, EveryEnumValueConvertsAndOthersAreRefused) {
  kernels::DType dtype;
  kernels::KvDType kv_dtype;
  Layout layout;
  for (int value = 0; value < 8; ++value) {
    EXPECT_EQ(ToDType(static_cast<v1::DType>(value), &dtype).ok(),
              v1::DType_IsValid(value) && value != v1::DTYPE_UNSPECIFIED);
    EXPECT_EQ(ToKvDType(static_cast<v1::KvDType>(value), &kv_dtype).ok(),
              v1::KvDType_IsValid(value));
    if (v1::KvDType_IsValid(value)) {
      kernels::KernelSpec spec;
      spec.kv_dtype = kv_dtype;
      EXPECT_EQ(ToKernelInfo(spec).kv_dtype(), value);
    }
    EXPECT_EQ(ToLayout(static_cast<v1::Layout>(value), &layout).ok(),
              v1::Layout_IsValid(value) && value != v1::LAYOUT_UNSPECIFIED);
    v1::AttendRequest message;
    message.set_dtype(v1::DTYPE_FLOAT16);
    message.set_layout(v1::LAYOUT_NHD);
    message.mutable_mask()->set_kind(static_cast<v1::Mask::Kind>(value));
    AttendRequest request;
    EXPECT_EQ(ToRequest(message, &request).ok(), v1::Mask::Kind_IsValid(value));
    message.clear_mask();
    message.set_precision(static_cast<v1::Precision>(value));
    EXPECT_EQ(ToRequest(message, &request).ok(), v1::Precision_IsValid(value));
    if (v1::Precision_IsValid(value)) {
      kernels::KernelSpec spec;
      spec.precision = request.precision;
      EXPECT_EQ(ToKernelInfo(spec).precision(), value);
    }
  }
}

TEST(ConvertTest, ATimeoutOfMoreThanAYearIsNone) {
  const testing::FakeClock clock;
  constexpr Nanoseconds kYear = std::chrono::hours(24 * 365);
  const auto year = static_cast<uint64_t>(kYear.count());
  EXPECT_EQ(DeadlineIn(year, clock), clock.Now() + kYear);
  for (const uint64_t none : {uint64_t{0}, year + 1, uint64_t{INT64_MAX}, UINT64_MAX}) {
    EXPECT_EQ(DeadlineIn(none, clock), kNoDeadline) << none;
  }
  using SystemTime = std::chrono::system_clock::time_point;
  const SystemTime now = std::chrono::system_clock::now();
  for (const SystemTime none : {SystemTime::max(), now + kYear + kYear}) {
    EXPECT_EQ(ToDeadline(none, clock), kNoDeadline);
  }
  EXPECT_NE(ToDeadline(now + kYear, clock), kNoDeadline);
}

}  // namespace
}  // namespace flashcore::server
