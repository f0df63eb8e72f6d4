#include "server/request/validate.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/fakes.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const RequestLimits kLimits{/*max_spans=*/8,
                            /*max_heads=*/64,
                            {kernels::DType::kFloat16},
                            {32, 64, 128},
                            /*max_flop=*/1e9};

TEST(ValidateAttendTest, AcceptsWhatIsConsistent) {
  EXPECT_EQ(ValidateAttend(testing::MakeRequest(), kLimits), absl::OkStatus());
  EXPECT_EQ(ValidateAttend(testing::MakeRequest(5, 0), kLimits), absl::OkStatus());
  EXPECT_EQ(ValidateAttend(testing::MakeRequest(3, 70, 64, 8, 128), kLimits), absl::OkStatus());
}

TEST(ValidateAttendTest, SumsRaggedSpans) {
  AttendRequest request = testing::MakeRequest(3, 10);
  request.spans.push_back({4, 20, "", std::nullopt});
  request.query_bytes = 7 * 2 * 64 * 2;
  request.key_bytes = request.value_bytes = 30 * 64 * 2;
  EXPECT_EQ(ValidateAttend(request, kLimits), absl::OkStatus());
}

struct BadCase {
  const char* name;
  std::function<void(AttendRequest&)> spoil;
  absl::StatusCode code;
  const char* message;  // all of: the field, what came, what is allowed
};

class ValidateAttendBadInputTest : public ::testing::TestWithParam<BadCase> {};

TEST_P(ValidateAttendBadInputTest, NamesFieldValueAndLimit) {
  AttendRequest request = testing::MakeRequest();
  GetParam().spoil(request);
  const absl::Status status = ValidateAttend(request, kLimits);
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr uint32_t kHuge = std::numeric_limits<uint32_t>::max();

INSTANTIATE_TEST_SUITE_P(
    All, ValidateAttendBadInputTest,
    ::testing::Values(
        BadCase{"OtherDType", [](AttendRequest& r) { r.dtype = kernels::DType::kBFloat16; },
                kInvalid, "dtype: bfloat16 is not one of float16"},
        BadCase{"NoHeads", [](AttendRequest& r) { r.num_heads = 0; }, kInvalid,
                "num_heads: 0 is not in 1..64"},
        BadCase{"TooManyHeads", [](AttendRequest& r) { r.num_heads = kHuge; }, kInvalid,
                "num_heads: 4294967295 is not in 1..64"},
        BadCase{"NoKvHeads", [](AttendRequest& r) { r.num_kv_heads = 0; }, kInvalid,
                "num_kv_heads: 0 is not in 1..num_heads, which is 2"},
        BadCase{"MoreKvHeadsThanHeads", [](AttendRequest& r) { r.num_kv_heads = 4; }, kInvalid,
                "num_kv_heads: 4 is not in 1..num_heads, which is 2"},
        BadCase{"HeadsDoNotDivide",
                [](AttendRequest& r) {
                  r.num_heads = 8;
                  r.num_kv_heads = 3;
                },
                kInvalid, "num_kv_heads: 3 does not divide num_heads, which is 8"},
        BadCase{"NoHeadDim", [](AttendRequest& r) { r.head_dim = 0; }, kInvalid,
                "head_dim: 0 is not one of 32, 64, 128"},
        BadCase{"OtherHeadDim", [](AttendRequest& r) { r.head_dim = 80; }, kInvalid,
                "head_dim: 80 is not one of 32, 64, 128"},
        BadCase{"NoSpans", [](AttendRequest& r) { r.spans.clear(); }, kInvalid,
                "spans: 0 came; 1..8 are allowed"},
        BadCase{"TooManySpans", [](AttendRequest& r) { r.spans.resize(9); }, kInvalid,
                "spans: 9 came; 1..8 are allowed"},
        BadCase{"NoQueryRows", [](AttendRequest& r) { r.spans[0].query_rows = 0; }, kInvalid,
                "spans[0].query_rows: 0; at least 1 is needed"},
        BadCase{"HugeQueryRows", [](AttendRequest& r) { r.spans[0].query_rows = kHuge; }, kInvalid,
                "query: 256 bytes came, but 4294967295 rows of 2 heads of 64 elements need"},
        BadCase{"HugeKvRows", [](AttendRequest& r) { r.spans[0].kv_rows = kHuge; }, kInvalid,
                "key: 128 bytes came, but 4294967295 rows"},
        BadCase{"QueryOneByteShort", [](AttendRequest& r) { --r.query_bytes; }, kInvalid,
                "query: 255 bytes came, but 1 rows of 2 heads of 64 elements need 256"},
        BadCase{"QueryOneByteLong", [](AttendRequest& r) { ++r.query_bytes; }, kInvalid,
                "query: 257 bytes"},
        BadCase{"KeyOneByteShort", [](AttendRequest& r) { --r.key_bytes; }, kInvalid,
                "key: 127 bytes came, but 1 rows of 1 heads of 64 elements need 128"},
        BadCase{"ValueOneByteLong", [](AttendRequest& r) { ++r.value_bytes; }, kInvalid,
                "value: 129 bytes came"},
        BadCase{"NanScale", [](AttendRequest& r) { r.terms.softmax_scale = std::nanf(""); },
                kInvalid, "softmax_scale: nan is not finite"},
        BadCase{"InfiniteScale", [](AttendRequest& r) { r.terms.softmax_scale = -INFINITY; },
                kInvalid, "softmax_scale: -inf is not finite"},
        BadCase{"NegativeLeft", [](AttendRequest& r) { r.terms.mask.left = -1; }, kInvalid,
                "mask.window_left: -1 is negative"},
        BadCase{"NegativeRight", [](AttendRequest& r) { r.terms.mask.right = -7; }, kInvalid,
                "mask.window_right: -7 is negative"},
        BadCase{"LayerOfInline", [](AttendRequest& r) { r.layer = 3; }, kInvalid,
                "layer: 3; must be 0"},
        BadCase{"LongRequestId", [](AttendRequest& r) { r.request_id.assign(65, 'x'); }, kInvalid,
                "request_id: 65 bytes; at most 64"},
        BadCase{"BinaryRequestId", [](AttendRequest& r) { r.request_id = "a\nb"; }, kInvalid,
                "request_id: contains a character that is not printable"},
        BadCase{"ExpectedLengthOfInline", [](AttendRequest& r) { r.spans[0].expected_length = 4; },
                kInvalid, "spans[0].expected_length: is set, but the span names no sequence"},
        BadCase{"ShortSequenceId", [](AttendRequest& r) { r.spans[0].sequence_id = "0123456789"; },
                kInvalid, "spans[0].sequence_id: 10 bytes; an id has 16"}),
    [](const auto& param) { return param.param.name; });

// ---- Tensors in shared memory.

constexpr std::pair<Tensor, const char*> kRangeNames[] = {{kQuery, "query_range"},
                                                          {kKey, "key_range"},
                                                          {kValue, "value_range"},
                                                          {kOutput, "output_range"},
                                                          {kLse, "lse_range"}};

class ValidateRangesTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRegionBytes = 4096;

  // Every tensor is in a region of its own, at its end.
  AttendRequest InRegions() const {
    AttendRequest request = testing::MakeRequest(2, 3);
    request.return_lse = true;
    const size_t bytes[kNumTensors] = {request.query_bytes, request.key_bytes, request.value_bytes,
                                       request.output_bytes(), request.lse_bytes()};
    for (size_t i = 0; i < kNumTensors; ++i) {
      request.ranges[i] = {memory_.Map(), kRegionBytes - bytes[i], bytes[i]};
    }
    return request;
  }
  // Expects that it is refused, with an error that begins so.
  static void ExpectRefused(const AttendRequest& request, const std::string& error) {
    const absl::Status status = ValidateAttend(request, kLimits);
    EXPECT_EQ(status.code(), kInvalid) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(error));
  }

  const testing::Memfd memory_{kRegionBytes};
};

TEST_F(ValidateRangesTest, MayEndWithTheirRegion) {
  EXPECT_EQ(ValidateAttend(InRegions(), kLimits), absl::OkStatus());
}

TEST_F(ValidateRangesTest, MustLieInTheirRegion) {
  for (const auto& [tensor, name] : kRangeNames) {
    const AttendRequest good = InRegions();
    const uint64_t bytes = good.ranges[tensor].bytes;
    // The last two, added to the bytes, are small again.
    for (const uint64_t offset : {kRegionBytes - bytes + 16, kRegionBytes, kRegionBytes + 16,
                                  uint64_t{0} - 16, uint64_t{0} - bytes / 16 * 16}) {
      AttendRequest request = good;
      request.ranges[tensor].offset = offset;
      ExpectRefused(request, absl::StrCat(name, ".offset: ", offset, ", and the tensor has ", bytes,
                                          " bytes; the region has 4096"));
    }
  }
}

TEST_F(ValidateRangesTest, AreAlignedAndOfTheTensorsSize) {
  for (const auto& [tensor, name] : kRangeNames) {
    AttendRequest request = InRegions();
    request.ranges[tensor].offset -= 8;
    ExpectRefused(request, absl::StrCat(name, ".offset: ", request.ranges[tensor].offset,
                                        " is not a multiple of 16"));
    if (tensor < kOutput) continue;  // an input has the size that its range says
    request = InRegions();
    request.ranges[tensor].bytes += 16;
    ExpectRefused(request, absl::StrCat(name, ".bytes: ", request.ranges[tensor].bytes,
                                        ", but the tensor has "));
  }
}

TEST_F(ValidateRangesTest, OnlyInputsMayBeReadOnly) {
  for (const auto& [tensor, name] : kRangeNames) {
    AttendRequest request = InRegions();
    request.ranges[tensor].region = memory_.Map(/*read_only=*/true);
    if (tensor < kOutput) {
      EXPECT_EQ(ValidateAttend(request, kLimits), absl::OkStatus()) << name;
    } else {
      ExpectRefused(request, absl::StrCat(name, ": the region is read_only"));
    }
  }
}

TEST_F(ValidateRangesTest, OfLseNeedsReturnLse) {
  AttendRequest request = InRegions();
  request.return_lse = false;
  ExpectRefused(request, "lse_range: is set, but return_lse is not");
}

TEST(ValidateAttendTest, BoundsTheWorkOfAllSpansTogether) {
  // 4 * 1000 * 1000 * 2 * 64 = 5.12e8 for one span of these.
  AttendRequest request = testing::MakeRequest(1000, 1000);
  EXPECT_EQ(ValidateAttend(request, kLimits), absl::OkStatus());
  request.spans.push_back(request.spans[0]);
  for (size_t* bytes : {&request.query_bytes, &request.key_bytes, &request.value_bytes})
    *bytes *= 2;
  const absl::Status status = ValidateAttend(request, kLimits);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("need 1.024e+09 floating-point operations; at most 1e+09"));
}

TEST(ValidateAttendTest, CountsTheRowsThatAreInTheSequence) {
  const AttendRequest request = testing::MakeRequest(1000, 1000);
  EXPECT_EQ(ValidateWork(request, {900}, kLimits.max_flop), absl::OkStatus());
  EXPECT_EQ(ValidateWork(request, {1000}, kLimits.max_flop).code(), kInvalid);
}

TEST(ValidateAttendTest, ProductsThatOverflowAreRejected) {
  // 8 spans of 2^32 - 1 rows, 2^31 heads of 2^10 elements: far beyond 2^64 bytes. A computation
  // modulo 2^64 could be made to equal the bytes that came.
  RequestLimits limits{8, 1u << 31, {kernels::DType::kFloat16}, {1024}, 1e9};
  AttendRequest request = testing::MakeRequest();
  request.num_heads = 1u << 31;
  request.head_dim = 1024;
  request.spans.resize(8);
  for (SpanShape& span : request.spans) span.query_rows = kHuge - 7;
  request.query_bytes = 0;
  const absl::Status status = ValidateAttend(request, limits);
  EXPECT_EQ(status.code(), kInvalid);
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 2^64"));
}

}  // namespace
}  // namespace flashcore::server
