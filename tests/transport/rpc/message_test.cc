// Replies of the local socket: their sizes, and what is cut so that they fit.
#include "server/transport/rpc/message.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "flashcore/v1/attention.pb.h"
#include "gtest/gtest.h"
#include "server/base/error_info.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

// An operation that is complete, with LSE and the longest values of all other fields.
struct Completed {
  explicit Completed(size_t spans) {
    AttendRequest& request = operation.request;
    request = testing::MakeRequest();
    request.spans.assign(spans, {1, 1, "0123456789abcdef", {}});
    request.query_bytes = request.TensorBytes(static_cast<int64_t>(spans), request.num_heads);
    request.request_id.assign(64, 'r');
    request.return_lse = true;
    operation.identity.name = "client";
    operation.sequence_lengths.assign(spans, std::numeric_limits<uint64_t>::max());
    PhaseTimes& times = operation.times;
    times.receive = times.staging_wait = times.queue = times.copy_in = times.kernel =
        times.copy_out = Nanoseconds::max();
    operation.tensors.claim()->client = operation.identity.name;
    EXPECT_EQ(operation.tensors.Allocate(request, &pool), absl::OkStatus());
    std::memset(operation.tensors.output(), 1, request.output_bytes());
    std::memset(operation.tensors.lse(), 2, request.lse_bytes());
  }

  StagingPool pool{size_t{64} << 20, StagingPool::HeapAllocator()};
  AttendOperation operation;
};

TEST(MessageTest, MaxReplyBytesIsALimitAndNotMuchMore) {
  for (const size_t spans : {1, 2, 100, 4000}) {
    Completed completed(spans);
    const size_t limit = MaxReplyBytes(completed.operation.request);
    std::string reply;
    WriteReply(&completed.operation, &reply);
    EXPECT_LE(reply.size(), limit) << spans;
    EXPECT_GE(reply.size() + 100, limit) << spans;
  }
}

TEST(MessageTest, StagedReplyBytesAreThoseOfOutputAndLseThatAreSent) {
  Completed completed(3);
  AttendRequest& request = completed.operation.request;
  EXPECT_EQ(StagedReplyBytes(completed.operation), 3 * (2 * 64 * 2 + 2 * 4));
  request.return_lse = false;
  EXPECT_EQ(StagedReplyBytes(completed.operation), 3 * 2 * 64 * 2);
}

TEST(MessageTest, AReplyHasOutputAndLse) {
  Completed completed(2);
  std::string bytes;
  WriteReply(&completed.operation, &bytes);
  v1::AttendResponse reply;
  ASSERT_TRUE(reply.ParseFromString(bytes));
  EXPECT_EQ(reply.request_id(), std::string(64, 'r'));
  EXPECT_EQ(reply.output(), std::string(2 * 2 * 64 * 2, '\1'));
  EXPECT_EQ(reply.lse(), std::string(2 * 2 * 4, '\2'));
  EXPECT_EQ(reply.sequence_lengths_size(), 2);
  EXPECT_EQ(completed.pool.used_bytes(),
            StagingPool::SizeClass(completed.operation.tensors.input_bytes()));
}

// `max_bytes` as small as a ring may have it, and larger.
TEST(MessageTest, AnErrorIsCutSoThatItFits) {
  const std::string id(64, 'i');
  for (const size_t max_bytes : {240, 500, 1000, 5000}) {
    for (const size_t length : {0, 100, 400, 4000, 100'000}) {
      for (const bool has_info : {false, true}) {
        absl::Status status = absl::InternalError(std::string(length, 'm'));
        if (has_info) {
          status = WithInfo(status, reason::kKvFull, {{"limit", std::string(100, 'l')}});
        }
        std::string bytes;
        WriteError(id, status, max_bytes, &bytes);
        const std::string what = absl::StrCat(max_bytes, " ", length, " ", has_info);
        EXPECT_LE(bytes.size(), max_bytes) << what;
        v1::AttendResponse reply;
        ASSERT_TRUE(reply.ParseFromString(bytes)) << what;
        EXPECT_EQ(reply.request_id(), id);
        EXPECT_EQ(reply.status().code(), static_cast<int>(absl::StatusCode::kInternal));
        const std::string& message = reply.status().message();
        EXPECT_EQ(message, std::string(message.size(), 'm'));
        if (message.size() == length) continue;  // else as much as there is room for
        EXPECT_GE(bytes.size() + 4 * 20, std::min(max_bytes, length)) << what;
      }
    }
  }
}

TEST(MessageTest, AnErrorKeepsItsInfoIfThatLeavesRoomForTheText) {
  const absl::Status status =
      WithInfo(absl::InternalError("text"), reason::kKvFull, {{"limit", std::string(100, 'l')}});
  std::string bytes;
  v1::AttendResponse reply;
  WriteError("", status, 1000, &bytes);
  ASSERT_TRUE(reply.ParseFromString(bytes));
  EXPECT_EQ(reply.status().details_size(), 1);
  WriteError("", status, 240, &bytes);
  ASSERT_TRUE(reply.ParseFromString(bytes));
  EXPECT_EQ(reply.status().details_size(), 0);
  EXPECT_EQ(reply.status().message(), "text");
}

}  // namespace
}  // namespace flashcore::server
