// The client's types against attention.proto, by protobuf's descriptors: a field or an enum value
// that the contract has and the client has not fails here.
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/answer.h"
#include "client/cpp/encode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/cpp_device_fixture.h"
#include "tests/client/request_fixture.h"

namespace flashcore::client {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::testing::IsEmpty;

std::string BytesOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

v1::AttendRequest Parse(const grpc::ByteBuffer& message) {
  v1::AttendRequest request;
  EXPECT_TRUE(request.ParseFromString(BytesOf(message)));
  return request;
}

// Full names of the fields of its type that `message` does not have.
std::vector<std::string> MissingFields(const google::protobuf::Message& message) {
  std::vector<const FieldDescriptor*> present;
  message.GetReflection()->ListFields(message, &present);
  const std::set<const FieldDescriptor*> set(present.begin(), present.end());
  std::vector<std::string> missing;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (set.count(field) == 0) missing.push_back(field->full_name());
  }
  return missing;
}

// Numbers of the values of an enum, without that of 0 if it stands for "unspecified".
std::set<int> Values(const google::protobuf::EnumDescriptor* descriptor) {
  std::set<int> values;
  for (int i = 0; i < descriptor->value_count(); ++i) {
    const std::string& name = descriptor->value(i)->name();
    if (name.find("UNSPECIFIED") == name.npos) values.insert(descriptor->value(i)->number());
  }
  return values;
}

class ContractTest : public CppDeviceTest {};

TEST_F(ContractTest, TheClientSendsEveryFieldOfARequest) {
  RequestFixture r("name");
  AttendRequest& request = r.request;
  request.spans[0].sequence_id = "0123456789abcdef";
  request.spans[0].expected_length = 5;
  request.dtype = DType::kBFloat16;
  request.layout = Layout::kHND;
  request.mask = Mask::SlidingWindow(7, 9);
  request.softmax_scale = 0.25f;
  request.precision = Precision::kInt8QkPv;
  request.layer = 3;
  v1::AttendRequest sent =
      Parse(EncodeRequest(request, 1 << 20, /*borrowed=*/nullptr, /*timeout_ns=*/5)->message);

  // The same over the local socket, in the order of a CUDA stream.
  v1::AttendRequest in_ring;
  server_.on_attend = [&](const v1::AttendRequest& got) {
    in_ring = got;
    return v1::Status();
  };
  CudaStreams streams;
  CUstream const stream = streams.New();
  auto memory = std::make_unique<DeviceMemory>(Allocate());
  std::byte* at = memory->address() + 16;
  const auto take = [&at](size_t bytes) { return std::exchange(at, at + (bytes + 15) / 16 * 16); };
  request.query = {take(r.query.size()), r.query.size()};
  request.key = {take(r.key.size()), r.key.size()};
  request.value = {take(r.value.size()), r.value.size()};
  request.output = {take(r.output.size()), r.output.size()};
  request.lse = {reinterpret_cast<float*>(take(r.lse_values.size() * sizeof(float))),
                 r.lse_values.size()};
  for (int i = 0; i < 2; ++i) {  // the first has counters at offset 0
    Outcome outcome;
    client_->AttendOnCudaStream(request, i == 0 ? stream : streams.New(), outcome.Callback());
    ASSERT_EQ(outcome.Wait(), absl::OkStatus());
  }
  memory.reset();
  Close();
  sent.MergeFrom(in_ring);
  EXPECT_THAT(MissingFields(sent), IsEmpty());
  EXPECT_THAT(MissingFields(sent.inputs_ready()), IsEmpty());
  EXPECT_THAT(MissingFields(sent.results_ready()), IsEmpty());
  EXPECT_THAT(MissingFields(sent.query_range()), IsEmpty());
  EXPECT_THAT(MissingFields(sent.spans(0)), IsEmpty());
  EXPECT_THAT(MissingFields(sent.mask()), IsEmpty());
  for (const auto& [range, bytes] : {std::pair(sent.query_range(), r.query.size()),
                                     {sent.key_range(), r.key.size()},
                                     {sent.value_range(), r.value.size()},
                                     {sent.output_range(), r.output.size()},
                                     {sent.lse_range(), r.lse_values.size() * sizeof(float)}}) {
    EXPECT_EQ(range.bytes(), bytes);
  }
}

TEST_F(ContractTest, TheClientHasEveryPhaseOfTiming) {
  const std::map<std::string, uint64_t Timing::*> phases = {
      {"receive_ns", &Timing::receive_ns}, {"staging_wait_ns", &Timing::staging_wait_ns},
      {"queue_ns", &Timing::queue_ns},     {"copy_in_ns", &Timing::copy_in_ns},
      {"kernel_ns", &Timing::kernel_ns},   {"copy_out_ns", &Timing::copy_out_ns}};
  EXPECT_EQ(sizeof(Timing), phases.size() * sizeof(uint64_t)) << "a phase is missing above";
  v1::AttendResponse response;
  v1::Timing* timing = response.mutable_timing();
  const google::protobuf::Descriptor* descriptor = v1::Timing::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    timing->GetReflection()->SetUInt64(timing, descriptor->field(i),
                                       100 + static_cast<uint64_t>(i));
  }
  const std::string bytes = response.SerializeAsString();
  const grpc::Slice slice(bytes);
  const absl::StatusOr<Answer> answer = ParseAnswer(grpc::ByteBuffer(&slice, 1), 1);
  ASSERT_TRUE(answer.ok());
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const std::string& name = descriptor->field(i)->name();
    ASSERT_EQ(phases.count(name), 1u) << name;
    EXPECT_EQ(answer->result.timing.*phases.at(name), 100 + static_cast<uint64_t>(i)) << name;
  }
}

TEST_F(ContractTest, TheClientHasEveryValueOfTheEnums) {
  std::set<int> dtypes, layouts, masks;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) dtypes.insert(ToProto(dtype));
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) layouts.insert(ToProto(layout));
  for (const Mask& mask : {Mask::None(), Mask::Causal(), Mask::SlidingWindow(1, 1)}) {
    RequestFixture r;
    r.request.mask = mask;
    masks.insert(Parse(EncodeRequest(r.request, 1 << 20)->message).mask().kind());
  }
  std::set<int> precisions;
  for (const Precision precision : {Precision::k16Bit, Precision::kInt8Qk, Precision::kInt8QkPv}) {
    precisions.insert(ToProto(precision));
    EXPECT_EQ(FromProto(ToProto(precision)), precision);
  }
  EXPECT_EQ(precisions, Values(v1::Precision_descriptor()));
  EXPECT_EQ(dtypes, Values(v1::DType_descriptor()));
  EXPECT_EQ(layouts, Values(v1::Layout_descriptor()));
  EXPECT_EQ(masks, Values(v1::Mask::Kind_descriptor()));
}

}  // namespace
}  // namespace flashcore::client
