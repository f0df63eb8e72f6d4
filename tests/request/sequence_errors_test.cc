#include "server/request/sequence_errors.h"

#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error_info.h"
#include "tests/base/has_info.h"

namespace flashcore::server {
namespace {

using testing::HasInfo;
using ::testing::SizeIs;

constexpr size_t kSpans = 300;

// A request of `kSpans` sequences.
AttendRequest Request() {
  AttendRequest request;
  for (size_t i = 0; i < kSpans; ++i) {
    SequenceId id;
    id.low = i << 56;  // its last byte, and the one before, are the number of the span
    id.low |= (i >> 8) << 48;
    request.spans.push_back({1, 0, id.ToBytes(), std::nullopt});
  }
  return request;
}

TEST(SequenceErrorsTest, OneLostSequenceIsNamed) {
  const absl::Status status = SequencesLost(Request(), {10}, "it is gone");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "spans[10].sequence_id: it is gone");
  EXPECT_THAT(status,
              HasInfo("SEQUENCE_LOST", {{"sequence_ids", "0000000000000000000000000000000a"},
                                        {"spans", "10"},
                                        {"lost", "1"}}));
}

TEST(SequenceErrorsTest, AllLostSequencesAreNamedToProgramsAndTheFirstInTheText) {
  const absl::Status status = SequencesLost(Request(), {0, 3, 4, 7, 8, 9}, "it is gone");
  EXPECT_EQ(status.message(),
            "spans[0].sequence_id, spans[3].sequence_id, spans[4].sequence_id, "
            "spans[7].sequence_id and 2 more, 6 in all: it is gone");
  EXPECT_THAT(status, HasInfo("SEQUENCE_LOST", {{"sequence_ids",
                                                 "00000000000000000000000000000000,"
                                                 "00000000000000000000000000000003,"
                                                 "00000000000000000000000000000004,"
                                                 "00000000000000000000000000000007,"
                                                 "00000000000000000000000000000008,"
                                                 "00000000000000000000000000000009"},
                                                {"spans", "0,3,4,7,8,9"},
                                                {"lost", "6"}}));
}

TEST(SequenceErrorsTest, AsManyAreNamedAsTheMetadataOfAnRpcHasRoomFor) {
  std::vector<size_t> lost(kSpans);
  std::iota(lost.begin(), lost.end(), 0);
  const absl::Status status = SequencesLost(Request(), lost, "they are gone");
  const ErrorInfo info = GetErrorInfo(status).value_or(ErrorInfo());
  ASSERT_EQ(info.metadata.size(), 3u);
  EXPECT_EQ(info.metadata.at("lost"), "300");
  EXPECT_THAT(std::vector<std::string>(absl::StrSplit(info.metadata.at("sequence_ids"), ',')),
              SizeIs(kMaxNamedLost));
  EXPECT_THAT(std::vector<std::string>(absl::StrSplit(info.metadata.at("spans"), ',')),
              SizeIs(kMaxNamedLost));
}

TEST(SequenceErrorsTest, ALoadHasNoSpans) {
  AttendRequest request = Request();
  request.append_only = true;
  EXPECT_THAT(SequencesLost(request, {1}, "it is gone"),
              HasInfo("SEQUENCE_LOST",
                      {{"sequence_ids", "00000000000000000000000000000001"}, {"lost", "1"}}));
}

TEST(SequenceErrorsTest, ALengthMismatchHasBothLengths) {
  SequenceId id;
  id.high = 0xff;
  const absl::Status status = LengthMismatch(id, 3, 4, std::nullopt, "text");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "text");
  EXPECT_THAT(status,
              HasInfo("LENGTH_MISMATCH", {{"sequence_id", "ff000000000000000000000000000000"},
                                          {"expected", "3"},
                                          {"actual", "4"}}));
  EXPECT_THAT(LengthMismatch(id, 3, 4, 7, "text"),
              HasInfo("LENGTH_MISMATCH", {{"sequence_id", "ff000000000000000000000000000000"},
                                          {"expected", "3"},
                                          {"actual", "4"},
                                          {"span", "7"}}));
}

}  // namespace
}  // namespace flashcore::server
