// Clients and servers of different ages. An old client knows the first contract alone; a new one
// sends fields that this server does not know.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "first_contract.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/unknown_field_set.h"
#include "kernels/half.h"
#include "kernels/reference.h"
#include "proto/grpc_compat.h"
#include "server/device/cpu_device.h"
#include "tests/base/test_seed.h"
#include "tests/engine/attend_job.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::google::protobuf::Descriptor;
using ::google::protobuf::EnumDescriptor;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::FileDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::ServiceDescriptor;
using ::testing::ElementsAre;

void ExpectUnderstood(const EnumDescriptor& first, const EnumDescriptor* now) {
  ASSERT_NE(now, nullptr) << first.full_name();
  for (int i = 0; i < first.value_count(); ++i) {
    const auto* value = now->FindValueByNumber(first.value(i)->number());
    ASSERT_NE(value, nullptr) << first.value(i)->full_name();
    EXPECT_EQ(value->name(), first.value(i)->name());
  }
}

void ExpectUnderstood(const FieldDescriptor& first, const FieldDescriptor& now) {
  // Names of fields do not travel.
  EXPECT_EQ(now.type(), first.type()) << first.full_name();
  EXPECT_EQ(now.label(), first.label()) << first.full_name();
  EXPECT_EQ(now.has_presence(), first.has_presence()) << first.full_name();
  if (first.message_type() != nullptr && now.message_type() != nullptr) {
    EXPECT_EQ(now.message_type()->name(), first.message_type()->name()) << first.full_name();
  }
  if (first.enum_type() != nullptr && now.enum_type() != nullptr) {
    EXPECT_EQ(now.enum_type()->name(), first.enum_type()->name()) << first.full_name();
  }
}

void ExpectUnderstood(const Descriptor& first, const Descriptor* now) {
  ASSERT_NE(now, nullptr) << first.full_name();
  for (int i = 0; i < first.field_count(); ++i) {
    const FieldDescriptor& field = *first.field(i);
    if (const FieldDescriptor* same = now->FindFieldByNumber(field.number()); same != nullptr) {
      ExpectUnderstood(field, *same);
    } else {
      // A field may go if no other ever takes its number.
      EXPECT_TRUE(now->IsReservedNumber(field.number())) << field.full_name();
    }
  }
  for (int i = 0; i < first.reserved_range_count(); ++i) {
    const Descriptor::ReservedRange& range = *first.reserved_range(i);
    for (int number = range.start; number < range.end; ++number) {
      EXPECT_TRUE(now->IsReservedNumber(number)) << first.full_name() << " " << number;
    }
  }
  for (int i = 0; i < first.enum_type_count(); ++i) {
    ExpectUnderstood(*first.enum_type(i), now->FindEnumTypeByName(first.enum_type(i)->name()));
  }
}

void ExpectUnderstood(const ServiceDescriptor& first, const ServiceDescriptor* now) {
  ASSERT_NE(now, nullptr) << first.full_name();
  for (int i = 0; i < first.method_count(); ++i) {
    const auto& method = *first.method(i);
    const auto* same = now->FindMethodByName(method.name());
    ASSERT_NE(same, nullptr) << method.full_name();
    EXPECT_EQ(same->input_type()->name(), method.input_type()->name());
    EXPECT_EQ(same->output_type()->name(), method.output_type()->name());
    EXPECT_EQ(same->client_streaming(), method.client_streaming());
    EXPECT_EQ(same->server_streaming(), method.server_streaming());
  }
}

TEST(FirstContractTest, IsUnderstoodAndItsReservedNumbersStayReserved) {
  const FileDescriptor& old = *first::AttendRequest::descriptor()->file();
  const FileDescriptor& now = *v1::AttendRequest::descriptor()->file();
  ASSERT_EQ(old.message_type_count(), 26);
  ASSERT_EQ(first::AttendRequest::descriptor()->reserved_range_count(), 2);
  for (int i = 0; i < old.message_type_count(); ++i) {
    ExpectUnderstood(*old.message_type(i), now.FindMessageTypeByName(old.message_type(i)->name()));
  }
  for (int i = 0; i < old.enum_type_count(); ++i) {
    ExpectUnderstood(*old.enum_type(i), now.FindEnumTypeByName(old.enum_type(i)->name()));
  }
  EXPECT_EQ(now.package(), "flashcore.v1");
  ExpectUnderstood(*old.service(0), now.FindServiceByName("AttentionService"));
}

constexpr uint32_t kHeads = 2;

class OldClientTest : public testing::GatedServerTest {
 protected:
  void SetUp() override {
    CpuDevice::Options options;
    options.threads = 2;
    options.kv_memory_bytes = 16 << 20;
    Start(CpuDevice::Create(options, clock_).value());
    channel_ = grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials());
  }

  std::string Tensor(uint32_t rows, uint32_t heads) {
    const auto tensor = testing::RandomTensor(size_t{rows} * heads * testing::kRowBytes,
                                              kernels::DType::kFloat16, &random_);
    return {reinterpret_cast<const char*>(tensor.data()), tensor.size()};
  }

  static grpc::ByteBuffer ToBuffer(const Message& message) {
    const grpc::Slice slice(message.SerializeAsString());
    return {&slice, 1};
  }
  template <typename Response>
  static Response Parse(const grpc::ByteBuffer& buffer) {
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(buffer.Dump(&slices).ok());
    std::string bytes;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    Response response;
    EXPECT_TRUE(response.ParseFromString(bytes));
    return response;
  }
  static std::string Path(const std::string& method) {
    return "/flashcore.v1.AttentionService/" + method;
  }

  template <typename Response>
  Response Call(const std::string& method, const Message& request) {
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    const grpc::Status status = grpc_compat::CallUnary(channel_.get(), Path(method).c_str(),
                                                       &context, ToBuffer(request), &reply);
    EXPECT_TRUE(status.ok()) << method << ": " << status.error_message();
    return Parse<Response>(reply);
  }

  first::LoadSequenceResponse Load(const std::string& id, uint32_t rows, const std::string& key,
                                   const std::string& value) {
    first::LoadSequenceRequest chunk;
    chunk.set_sequence_id(id);
    chunk.set_expected_length(0);
    chunk.set_layout(first::LAYOUT_NHD);
    chunk.set_rows(rows);
    chunk.set_key(key);
    chunk.set_value(value);
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    const auto writer =
        grpc_compat::OpenWriter(channel_.get(), Path("LoadSequence").c_str(), &context, &reply);
    EXPECT_TRUE(writer->Write(ToBuffer(chunk)));
    writer->WritesDone();
    EXPECT_TRUE(writer->Finish().ok());
    return Parse<first::LoadSequenceResponse>(reply);
  }

  // Of one causal span.
  static first::AttendRequest Request(uint32_t query_rows, const std::string& sequence_id,
                                      const std::string& query, const std::string& key,
                                      const std::string& value) {
    first::AttendRequest request;
    request.set_request_id("old");
    first::Span* span = request.add_spans();
    span->set_query_rows(query_rows);
    span->set_kv_rows(static_cast<uint32_t>(key.size() / testing::kRowBytes));
    span->set_sequence_id(sequence_id);
    request.set_dtype(first::DTYPE_FLOAT16);
    request.set_num_heads(kHeads);
    request.set_num_kv_heads(1);
    request.set_head_dim(testing::kHeadDim);
    request.set_layout(first::LAYOUT_NHD);
    request.mutable_mask()->set_kind(first::Mask::KIND_CAUSAL);
    request.set_return_lse(true);
    request.set_query(query);
    request.set_key(key);
    request.set_value(value);
    return request;
  }
  first::AttendResponse Attend(const first::AttendRequest& request) {
    return Call<first::AttendResponse>("Attend", request);
  }

  // Compares with attention in float64.
  static void ExpectRight(const first::AttendResponse& response, const std::string& query,
                          const std::string& key, const std::string& value) {
    const int64_t row = testing::kRowBytes;
    kernels::Span span;
    span.query = reinterpret_cast<const std::byte*>(query.data());
    span.row_stride = kHeads * row;
    span.head_stride = row;
    span.query_rows = static_cast<int32_t>(static_cast<int64_t>(query.size()) / span.row_stride);
    span.kv.key = reinterpret_cast<const std::byte*>(key.data());
    span.kv.value = reinterpret_cast<const std::byte*>(value.data());
    span.kv.row_stride = span.kv.head_stride = row;
    span.kv.page_stride = kernels::kPageTokens * row;
    span.kv.rows = static_cast<int32_t>(static_cast<int64_t>(key.size()) / row);
    span.mask = kernels::Mask::Causal();
    span.softmax_scale = 1.0f / std::sqrt(static_cast<float>(testing::kHeadDim));
    const kernels::ReferenceResult want = kernels::ReferenceAttention(
        {{kernels::DType::kFloat16, kHeads, 1, testing::kHeadDim}, &span, 1});
    ASSERT_EQ(response.output().size(), query.size());
    ASSERT_EQ(response.lse().size(), want.lse.size() * sizeof(float));
    const testing::Tolerance tolerance = testing::KernelTolerance(kernels::DType::kFloat16);
    for (size_t i = 0; i < want.output.size(); ++i) {
      uint16_t half = 0;
      std::memcpy(&half, &response.output()[i * sizeof(half)], sizeof(half));
      ASSERT_NEAR(kernels::ToFloat(kernels::DType::kFloat16, half), want.output[i],
                  tolerance.output)
          << i;
    }
    for (size_t i = 0; i < want.lse.size(); ++i) {
      float lse = 0;
      std::memcpy(&lse, &response.lse()[i * sizeof(lse)], sizeof(lse));
      ASSERT_NEAR(lse, want.lse[i], tolerance.lse) << i;
    }
  }

  std::mt19937 random_{TestSeed()};
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(OldClientTest, GetsRightAnswersToInlineRequests) {
  const std::string query = Tensor(3, kHeads), key = Tensor(70, 1), value = Tensor(70, 1);
  const first::AttendResponse response = Attend(Request(3, "", query, key, value));
  EXPECT_EQ(response.request_id(), "old");
  EXPECT_GT(response.timing().kernel_ns(), 0u);
  ExpectRight(response, query, key, value);
}

TEST_F(OldClientTest, GetsRightAnswersOverSequences) {
  first::CreateSequenceRequest create;
  create.set_num_layers(1);
  create.set_num_kv_heads(1);
  create.set_head_dim(testing::kHeadDim);
  create.set_dtype(first::DTYPE_FLOAT16);
  const std::string id =
      Call<first::CreateSequenceResponse>("CreateSequence", create).sequence_id();
  ASSERT_EQ(id.size(), 16u);
  std::string key = Tensor(100, 1), value = Tensor(100, 1);
  EXPECT_THAT(Load(id, 100, key, value).sequence().layer_lengths(), ElementsAre(100));

  const std::string query = Tensor(2, kHeads), new_key = Tensor(2, 1), new_value = Tensor(2, 1);
  const first::AttendResponse step = Attend(Request(2, id, query, new_key, new_value));
  EXPECT_THAT(step.sequence_lengths(), ElementsAre(102));
  key += new_key;
  value += new_value;
  ExpectRight(step, query, key, value);

  first::ForkSequenceRequest fork;
  fork.set_sequence_id(id);
  fork.set_length(64);
  const auto forked = Call<first::ForkSequenceResponse>("ForkSequence", fork);
  ExpectRight(Attend(Request(2, forked.sequence_id(), query, "", "")), query,
              key.substr(0, 64 * testing::kRowBytes), value.substr(0, 64 * testing::kRowBytes));

  const auto list =
      Call<first::ListSequencesResponse>("ListSequences", first::ListSequencesRequest());
  ASSERT_EQ(list.sequences_size(), 2);
  EXPECT_EQ(list.sequences(0).sequence_id(), id);
  EXPECT_EQ(list.sequences(0).device_id(), "cpu");
}

TEST_F(OldClientTest, ReadsWhatItKnowsOfTheServer) {
  const auto info =
      Call<first::GetServerInfoResponse>("GetServerInfo", first::GetServerInfoRequest());
  EXPECT_EQ(info.version(), "test");
  EXPECT_EQ(info.limits().max_message_bytes(), testing::ServerOptions().max_message_bytes);
  // The server has limits that the first contract had not.
  EXPECT_FALSE(info.limits().GetReflection()->GetUnknownFields(info.limits()).empty());
}

// Fields of every wire type, with numbers that are reserved or that no message has.
void AddUnknownFields(Message* message) {
  auto* unknown = message->GetReflection()->MutableUnknownFields(message);
  for (const int number : {12, 16, 31, 100, 5000, (1 << 29) - 1}) {
    unknown->AddVarint(number, ~uint64_t{0});
    unknown->AddFixed32(number, 7);
    unknown->AddFixed64(number, 7);
    unknown->AddLengthDelimited(number, std::string(1000, 'u'));
    unknown->AddGroup(number)->AddLengthDelimited(1, "in a group");
  }
}

TEST_F(OldClientTest, ANewerClientsUnknownFieldsChangeNothing) {
  const std::string query = Tensor(3, kHeads), key = Tensor(70, 1), value = Tensor(70, 1);
  first::AttendRequest request = Request(3, "", query, key, value);
  const first::AttendResponse plain = Attend(request);
  AddUnknownFields(&request);
  AddUnknownFields(request.mutable_spans(0));
  AddUnknownFields(request.mutable_mask());
  const first::AttendResponse answer = Attend(request);
  EXPECT_EQ(answer.output(), plain.output());
  EXPECT_EQ(answer.lse(), plain.lse());
  ExpectRight(answer, query, key, value);
}

}  // namespace
}  // namespace flashcore::server
