// Requests over the local socket that the contract refuses, field by field.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/attention.pb.h"
#include "flashcore/v1/local.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/message.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::kRowBytes;
using testing::LocalClient;

class LocalRequestsTest : public testing::LocalServerTest {};

TEST_F(LocalRequestsTest, FieldsThatItDoesNotKnowAreRefused) {
  StartLocal();
  Lane lane(path_);
  const auto spoil = [](google::protobuf::Message* message) {
    message->GetReflection()->MutableUnknownFields(message)->AddVarint(99, 1);
  };
  const auto expect = [](const absl::Status& status, const char* type) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("field 99 of ", type, " ")));
  };
  v1::AttendRequest step = lane.Step(lane.Create());
  spoil(step.mutable_query_range());
  expect(lane.Attend(step), "flashcore.v1.MemoryRange");
  v1::GetServerInfoRequest get;
  spoil(&get);
  v1::GetServerInfoResponse info;
  expect(lane.client.Call("GetServerInfo", get, &info), "flashcore.v1.GetServerInfoRequest");
  v1::LoadSequenceRequest chunk;
  spoil(&chunk);
  expect(lane.client.Call("LoadSequence", chunk, &info), "flashcore.v1.LoadSequenceRequest");
  v1::LocalRequest request;
  request.mutable_call()->set_method("GetServerInfo");
  spoil(request.mutable_call());
  expect(lane.client.Do(request), "flashcore.v1.LocalCall");
  request.Clear();  // an action of a later version
  spoil(&request);
  expect(lane.client.Do(request), "flashcore.v1.LocalRequest");
  EXPECT_EQ(lane.Attend(lane.Step(lane.Create())), absl::OkStatus()) << "the connection goes on";
  // A Cancel has no reply.
  request.mutable_cancel();
  request.set_id(lane.client.NextId());
  ASSERT_TRUE(lane.client.Send(request));
  const std::optional<v1::LocalReply> last = lane.client.Receive();
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->id(), 0u);
  EXPECT_EQ(last->status().code(), static_cast<int>(absl::StatusCode::kUnimplemented));
  EXPECT_FALSE(lane.client.Receive().has_value());
  // A Hello comes before the version is known.
  LocalClient other(path_);
  v1::LocalRequest hello;
  hello.mutable_hello()->set_min_version(1);
  hello.mutable_hello()->set_max_version(7);
  spoil(hello.mutable_hello());
  EXPECT_EQ(other.Do(hello), absl::OkStatus());
}

TEST_F(LocalRequestsTest, ARequestHasTheTimeoutOfItsSlotOrCall) {
  StartLocal();
  Lane lane(path_);
  v1::AttendRequest step = lane.Step(lane.Create());
  step.set_timeout_ns(5);
  v1::AttendResponse response;
  for (const absl::Status& status :
       {lane.Attend(step), lane.client.Call("Attend", step, &response)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("timeout_ns: 5; only requests of"));
  }
}

TEST_F(LocalRequestsTest, ARangeHasTheBytesOfItsTensor) {
  StartLocal();
  Lane lane(path_);
  const std::string id = lane.Create();
  const std::vector<v1::MemoryRange* (*)(v1::AttendRequest*)> ranges = {
      [](auto* step) { return step->mutable_query_range(); },
      [](auto* step) { return step->mutable_key_range(); },
      [](auto* step) { return step->mutable_value_range(); },
      [](auto* step) { return step->mutable_output_range(); }};
  for (const auto& range : ranges) {
    for (const uint64_t bytes : {uint64_t{0}, kRowBytes - 1, 2 * kRowBytes, ~uint64_t{0}}) {
      v1::AttendRequest step = lane.Step(id);
      range(&step)->set_bytes(bytes);
      const absl::Status status = lane.Attend(step);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("_range.bytes: ", bytes)));
    }
  }
  EXPECT_EQ(lane.Attend(lane.Step(id)), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore::server
