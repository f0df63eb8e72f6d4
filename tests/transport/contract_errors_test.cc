// Requests that gRPC itself lets through, and the contract does not: fields that the server does
// not know, ids in flight twice, messages over the limit; and the deadlines of requests of a
// stream.
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/message.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "proto/grpc/grpc_compat.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::google::protobuf::Message;
using ::google::protobuf::UnknownFieldSet;
using ::testing::HasSubstr;

class ContractErrorsTest : public testing::GatedServerTest {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::AttendRequest, v1::AttendResponse>;

  // A request on no sequence.
  static v1::AttendRequest Inline(const std::string& request_id = "r") {
    v1::AttendRequest request = testing::StepRequest({""});
    request.set_request_id(request_id);
    return request;
  }
  static UnknownFieldSet* UnknownOf(Message* message) {
    return message->GetReflection()->MutableUnknownFields(message);
  }
  static void ExpectUnknown(int code, absl::string_view message, const std::string& field) {
    EXPECT_EQ(code, grpc::UNIMPLEMENTED);
    EXPECT_THAT(std::string(message), HasSubstr(absl::StrCat("message: ", field, " is unknown")));
  }
  static void ExpectUnknown(const grpc::Status& status, const std::string& field) {
    ExpectUnknown(status.error_code(), status.error_message(), field);
  }
  // Sends `request` and receives its answer.
  static v1::AttendResponse Exchange(Stream* stream, const v1::AttendRequest& request) {
    v1::AttendResponse response;
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response));
    return response;
  }
  static void ExpectUsable(Stream* stream) {
    const v1::AttendResponse response = Exchange(stream, Inline("usable"));
    EXPECT_EQ(response.request_id(), "usable");
    EXPECT_FALSE(response.has_status()) << response.status().message();
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }

  grpc::ClientContext context_;
};

struct Unknown {
  const char* name;
  std::function<void(v1::AttendRequest*)> spoil;
  const char* field;
};

class UnknownFieldTest : public ContractErrorsTest,
                         public ::testing::WithParamInterface<Unknown> {};

TEST_P(UnknownFieldTest, IsRefusedInACallAndInAStream) {
  StartFake();
  v1::AttendRequest request = Inline();
  GetParam().spoil(&request);
  ExpectUnknown(Attend(request), GetParam().field);
  const auto stream = stub_->AttendStream(&context_);
  const v1::AttendResponse response = Exchange(stream.get(), request);
  EXPECT_EQ(response.request_id(), "r");
  ExpectUnknown(response.status().code(), response.status().message(), GetParam().field);
  ExpectUsable(stream.get());
}

void AddVarint(Message* message, int number) {
  message->GetReflection()->MutableUnknownFields(message)->AddVarint(number, 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, UnknownFieldTest,
    ::testing::Values(
        Unknown{"OfALaterVersion", [](auto* r) { AddVarint(r, 99); },
                "field 99 of flashcore.v1.AttendRequest"},
        Unknown{"Reserved", [](auto* r) { AddVarint(r, 16); },
                "field 16 of flashcore.v1.AttendRequest"},
        Unknown{"OfAnotherType", [](auto* r) { AddVarint(r, 13); },
                "field 13 of flashcore.v1.AttendRequest"},
        Unknown{"AGroup",
                [](auto* r) {
                  r->GetReflection()->MutableUnknownFields(r)->AddGroup(50)->AddVarint(1, 1);
                },
                "field 50 of flashcore.v1.AttendRequest"},
        Unknown{"Bytes",
                [](auto* r) {
                  r->GetReflection()->MutableUnknownFields(r)->AddLengthDelimited(31, "sinks");
                },
                "field 31 of flashcore.v1.AttendRequest"},
        Unknown{"InASpan", [](auto* r) { AddVarint(r->mutable_spans(0), 7); },
                "field 7 of flashcore.v1.Span"},
        Unknown{"InTheMask", [](auto* r) { AddVarint(r->mutable_mask(), 8); },
                "field 8 of flashcore.v1.Mask"},
        Unknown{"InARange", [](auto* r) { AddVarint(r->mutable_lse_range(), 9); },
                "field 9 of flashcore.v1.MemoryRange"}),
    [](const auto& param) { return param.param.name; });

TEST_F(ContractErrorsTest, OtherCallsWithUnknownFieldsDoNothing) {
  StartFake();
  v1::CreateSequenceRequest create = testing::CreateRequest();
  UnknownOf(&create)->AddFixed32(77, 1);
  v1::CreateSequenceResponse created;
  ExpectUnknown(stub_->CreateSequence(&context_, create, &created),
                "field 77 of flashcore.v1.CreateSequenceRequest");
  // The first operation is fine, and not run either.
  v1::ManageSequencesRequest manage;
  *manage.add_operations()->mutable_create() = testing::CreateRequest();
  *manage.add_operations()->mutable_create() = create;
  v1::ManageSequencesResponse managed;
  grpc::ClientContext of_manage;
  ExpectUnknown(stub_->ManageSequences(&of_manage, manage, &managed),
                "field 77 of flashcore.v1.CreateSequenceRequest");
  manage.mutable_operations(1)->Clear();  // an operation of a later version
  UnknownOf(manage.mutable_operations(1))->AddLengthDelimited(20, "");
  grpc::ClientContext again;
  ExpectUnknown(stub_->ManageSequences(&again, manage, &managed),
                "field 20 of flashcore.v1.SequenceOperation");
  EXPECT_EQ(engine_->sequences().stats().sequences, 0u);

  const std::string id = Create();
  v1::LoadSequenceRequest chunk;
  chunk.set_sequence_id(id);
  chunk.set_rows(1);
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_key(std::string(testing::kRowBytes, '\0'));
  chunk.set_value(chunk.key());
  UnknownOf(&chunk)->AddVarint(55, 1);
  v1::LoadSequenceResponse loaded;
  grpc::ClientContext of_load;
  const auto writer = stub_->LoadSequence(&of_load, &loaded);
  writer->Write(chunk);
  writer->WritesDone();
  ExpectUnknown(writer->Finish(), "field 55 of flashcore.v1.LoadSequenceRequest");
  EXPECT_EQ(Length(id), 0u);
}

TEST_F(ContractErrorsTest, ACallThatIsNoProtobufIsAnInvalidArgument) {
  StartFake();
  const auto channel =
      grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials());
  for (const char* method : {"GetServerInfo", "CreateSequence", "ManageSequences"}) {
    const grpc::Slice slice("\x0a\xff\xff", 3);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    grpc::ClientContext context;
    const grpc::Status status = grpc_compat::CallUnary(
        channel.get(), absl::StrCat("/flashcore.v1.AttentionService/", method).c_str(), &context,
        request, &reply);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << method;
    EXPECT_THAT(status.error_message(), HasSubstr("message: not well-formed protobuf"));
  }
}

TEST_F(ContractErrorsTest, AMessageOverTheLimitIsRefusedWithTheLimit) {
  StartFake();
  const std::string large(2 << 20, 'x');  // the limit is 1 MiB
  const auto expect = [](int code, const std::string& message) {
    EXPECT_EQ(code, grpc::RESOURCE_EXHAUSTED);
    EXPECT_THAT(message, HasSubstr("at most 1048576 are allowed (--max_message_bytes)"));
    EXPECT_THAT(message, HasSubstr("LoadSequence"));
  };
  v1::AttendRequest request = Inline();
  request.set_query(large);
  const grpc::Status attended = Attend(request);
  expect(attended.error_code(), attended.error_message());
  v1::CreateSequenceRequest create = testing::CreateRequest();
  create.set_device_id(large);
  v1::CreateSequenceResponse created;
  grpc::ClientContext of_create;
  const grpc::Status refused = stub_->CreateSequence(&of_create, create, &created);
  expect(refused.error_code(), refused.error_message());
  v1::LoadSequenceRequest chunk;
  chunk.set_key(large);
  v1::LoadSequenceResponse loaded;
  grpc::ClientContext of_load;
  const auto writer = stub_->LoadSequence(&of_load, &loaded);
  writer->Write(chunk);
  writer->WritesDone();
  const grpc::Status ended = writer->Finish();
  expect(ended.error_code(), ended.error_message());
  // In a stream, alone.
  const auto stream = stub_->AttendStream(&context_);
  const v1::AttendResponse response = Exchange(stream.get(), request);
  EXPECT_EQ(response.request_id(), "r");
  expect(response.status().code(), response.status().message());
  ExpectUsable(stream.get());
}

TEST_F(ContractErrorsTest, AnIdInFlightIsRefusedASecondTime) {
  StartFake();
  gate_.SetOpen(false);
  const auto stream = stub_->AttendStream(&context_);
  ASSERT_TRUE(stream->Write(Inline("twin")));
  ASSERT_TRUE(WaitForArrived(1));
  const v1::AttendResponse refused = Exchange(stream.get(), Inline("twin"));
  EXPECT_EQ(refused.request_id(), "") << "that of the request in flight is its own";
  EXPECT_EQ(refused.status().code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(refused.status().message(),
            "request_id: 'twin' is that of a request in flight on this stream");
  gate_.SetOpen(true);
  v1::AttendResponse first;
  ASSERT_TRUE(stream->Read(&first));
  EXPECT_EQ(first.request_id(), "twin");
  EXPECT_FALSE(first.has_status());
  EXPECT_FALSE(Exchange(stream.get(), Inline("twin")).has_status()) << "it is free again";
  // Also after a request that was refused for another reason.
  v1::AttendRequest bad = Inline("bad");
  bad.set_head_dim(48);
  for (int i = 0; i < 2; ++i) {
    const v1::AttendResponse response = Exchange(stream.get(), bad);
    EXPECT_EQ(response.request_id(), "bad");
    EXPECT_THAT(response.status().message(), HasSubstr("head_dim: 48"));
  }
  // Other streams have ids of their own.
  gate_.SetOpen(false);
  ASSERT_TRUE(stream->Write(Inline("both")));
  ASSERT_TRUE(WaitForArrived(3));
  grpc::ClientContext of_other;
  const auto other = stub_->AttendStream(&of_other);
  ASSERT_TRUE(other->Write(Inline("both")));
  ASSERT_TRUE(WaitForQueued(1));
  gate_.SetOpen(true);
  for (Stream* each : {stream.get(), other.get()}) {
    v1::AttendResponse response;
    ASSERT_TRUE(each->Read(&response));
    EXPECT_EQ(response.request_id(), "both");
    EXPECT_FALSE(response.has_status());
    ExpectUsable(each);
  }
}

TEST_F(ContractErrorsTest, ARequestOfAStreamHasItsOwnDeadline) {
  clock_ = &fake_clock_;
  StartFake();
  gate_.SetOpen(false);
  const auto stream = stub_->AttendStream(&context_);
  ASSERT_TRUE(stream->Write(Inline("running")));
  ASSERT_TRUE(WaitForArrived(1));
  v1::AttendRequest request = Inline("expires");
  request.set_timeout_ns(1'000'000'000);
  ASSERT_TRUE(stream->Write(request));
  request.set_request_id("patient");
  request.set_timeout_ns(60'000'000'000);
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(WaitForQueued(2));
  fake_clock_.Advance(std::chrono::seconds(1));
  gate_.SetOpen(true);
  int expired = 0;
  for (int i = 0; i < 3; ++i) {
    v1::AttendResponse response;
    ASSERT_TRUE(stream->Read(&response));
    if (response.request_id() == "expires") {
      ++expired;
      EXPECT_EQ(response.status().code(), grpc::DEADLINE_EXCEEDED);
      EXPECT_THAT(response.status().message(), HasSubstr("while the request was queued"));
    } else {
      EXPECT_FALSE(response.has_status()) << response.status().message();
    }
  }
  EXPECT_EQ(expired, 1);
  ExpectUsable(stream.get());
}

}  // namespace
}  // namespace flashcore::server
