#include <random>
#include <string>
#include <vector>

#include "flashcore/v1/attention.pb.h"
#include "gmock/gmock.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "proto/grpc/message_view.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

constexpr size_t kNoLimit = size_t{1} << 30;

grpc::ByteBuffer InSlices(const std::string& bytes, const std::vector<size_t>& cuts) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  for (const size_t cut : cuts) {
    slices.emplace_back(bytes.substr(begin, cut - begin));
    begin = cut;
  }
  slices.emplace_back(bytes.substr(begin));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// The code under test applied to a message: false if it is refused, else the message again, put
// together from the small fields and the tensors.
bool Reassemble(const grpc::ByteBuffer& message, size_t max_small_bytes, v1::AttendRequest* out) {
  wire::LargeField fields[3] = {{v1::AttendRequest::kQueryFieldNumber},
                                {v1::AttendRequest::kKeyFieldNumber},
                                {v1::AttendRequest::kValueFieldNumber}};
  std::string small;
  const wire::MessageView view = wire::ViewOf(message);
  if (!wire::SplitMessage(view, max_small_bytes, absl::MakeSpan(fields), &small).ok()) return false;
  if (!out->ParseFromString(small)) return false;
  std::string* tensors[3] = {out->mutable_query(), out->mutable_key(), out->mutable_value()};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(tensors[i]->empty());
    tensors[i]->resize(fields[i].size);
    wire::CopyField(view, fields[i], tensors[i]->data());
  }
  return true;
}

v1::AttendRequest ExampleRequest() {
  v1::AttendRequest request;
  request.set_request_id("example");
  request.set_dtype(v1::DTYPE_BFLOAT16);
  request.set_num_heads(300);
  request.mutable_mask()->set_window_left(-5);
  request.set_softmax_scale(0.25f);
  for (int i = 0; i < 3; ++i) {
    v1::Span* span = request.add_spans();
    span->set_query_rows(1 << (7 * i));
    span->set_sequence_id("0123456789abcdef");
    span->set_expected_length(uint64_t{1} << 40);
  }
  request.set_query(std::string(200, 'q'));
  request.set_key("");
  request.set_value("the value");
  return request;
}

TEST(WireTest, AnySplitOfSlicesGivesTheSameMessage) {
  const v1::AttendRequest want = ExampleRequest();
  const std::string bytes = want.SerializeAsString();
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    v1::AttendRequest got;
    ASSERT_TRUE(Reassemble(InSlices(bytes, {cut}), kNoLimit, &got)) << cut;
    EXPECT_EQ(got.SerializeAsString(), bytes) << cut;
  }
  std::vector<size_t> every_byte;
  for (size_t i = 1; i < bytes.size(); ++i) every_byte.push_back(i);
  v1::AttendRequest got;
  ASSERT_TRUE(Reassemble(InSlices(bytes, every_byte), kNoLimit, &got));
  EXPECT_EQ(got.SerializeAsString(), bytes);
}

TEST(WireTest, AnEmptyMessageIsTheDefault) {
  v1::AttendRequest got;
  EXPECT_TRUE(Reassemble(grpc::ByteBuffer(), kNoLimit, &got));
  EXPECT_EQ(got.ByteSizeLong(), 0u);
  EXPECT_TRUE(Reassemble(InSlices("", {}), kNoLimit, &got));
}

TEST(WireTest, FieldsMayComeInAnyOrderAndTheLastOfRepeatedOnesCounts) {
  v1::AttendRequest first, second;
  first.set_query("first query");
  first.set_num_heads(1);
  first.add_spans()->set_query_rows(1);
  second.set_query("second");
  second.set_num_heads(2);
  second.add_spans()->set_query_rows(2);
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  v1::AttendRequest want, got;
  ASSERT_TRUE(want.ParseFromString(bytes));
  ASSERT_TRUE(Reassemble(InSlices(bytes, {5, 9}), kNoLimit, &got));
  EXPECT_EQ(got.SerializeAsString(), want.SerializeAsString());
  EXPECT_EQ(got.query(), "second");
  EXPECT_EQ(got.spans_size(), 2);
}

TEST(WireTest, EveryTruncationIsRefusedExactlyWhenTheGeneratedParserRefusesIt) {
  const std::string bytes = ExampleRequest().SerializeAsString();
  for (size_t size = 0; size < bytes.size(); ++size) {
    v1::AttendRequest want, got;
    const std::string part = bytes.substr(0, size);
    EXPECT_EQ(Reassemble(InSlices(part, {size / 2}), kNoLimit, &got), want.ParseFromString(part))
        << size;
  }
}

TEST(WireTest, UnknownGroupsAreCheckedAsTheGeneratedParserDoes) {
  const auto nested = [](int depth) {
    return std::string(depth, '\x1b') + std::string(depth, '\x1c');  // group 3
  };
  for (const std::string& bytes : {
           nested(1), nested(50), nested(99), nested(100), nested(101), nested(102), nested(5000),
           std::string("\x1b\x08\x01\x1c"),  // with a varint in it
           std::string("\x1b\x0a\x02xy\x11"
                       "12345678"
                       "\x15"
                       "1234\x1c"),
           std::string("\x1b\x24"), std::string("\x1c"), std::string("\x1b"),
           std::string("\x1b\xd0\x80\x80\x80\x80\x80\x20\x01\x1c"),  // an overlong tag
       }) {
    v1::AttendRequest want, got;
    EXPECT_EQ(Reassemble(InSlices(bytes, {bytes.size() / 2}), kNoLimit, &got),
              want.ParseFromString(bytes))
        << ::testing::PrintToString(bytes.substr(0, 40));
  }
}

// A varint of `size` bytes, more than it needs.
std::string PaddedVarint(uint64_t value, size_t size) {
  std::string bytes;
  for (; bytes.size() + 1 < size; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value & 0x7f);
}

// protobuf allows tags and lengths of at most five bytes, needed or not.
TEST(WireTest, TagsAndLengthsOfUpToFiveBytesAreRead) {
  constexpr uint32_t kLength = 3;
  struct Field {
    const char* name;
    uint32_t tag;
    std::string before, after;  // around the field
  };
  const Field fields[] = {{"request_id", v1::AttendRequest::kRequestIdFieldNumber << 3 | 2, "", ""},
                          {"query", v1::AttendRequest::kQueryFieldNumber << 3 | 2, "", ""},
                          {"unknown", 100 << 3 | 2, "", ""},
                          {"in a group", 1 << 3 | 2, "\x1b", "\x1c"}};
  const google::protobuf::LogSilencer no_complaints;
  for (const Field& field : fields) {
    for (size_t size = 2; size <= 7; ++size) {
      for (const bool pad_tag : {false, true}) {
        const std::string bytes = field.before + PaddedVarint(field.tag, pad_tag ? size : 2) +
                                  PaddedVarint(kLength, pad_tag ? 1 : size) + "abc" + field.after;
        v1::AttendRequest want, got;
        ASSERT_EQ(want.ParseFromString(bytes), size <= 5) << field.name << " " << size;
        EXPECT_EQ(Reassemble(InSlices(bytes, {3}), kNoLimit, &got), size <= 5)
            << field.name << " " << size << " bytes of " << (pad_tag ? "tag" : "length");
        if (size > 5) continue;
        EXPECT_EQ(got.request_id(), want.request_id());
        EXPECT_EQ(got.query(), want.query());
      }
    }
  }
}

// 256 MiB and more need five bytes.
TEST(WireTest, LongTensorsHaveLengthsOfFiveBytes) {
  const grpc::Slice block(std::string(size_t{1} << 20, 'q'));
  const size_t bytes = size_t{300} << 20;
  std::vector<grpc::Slice> slices = {
      wire::FieldHeader(v1::AttendRequest::kQueryFieldNumber, bytes)};
  ASSERT_EQ(slices[0].size(), 1u + 5u);
  slices.insert(slices.end(), bytes / block.size(), block);  // the same memory again and again
  wire::LargeField query = {v1::AttendRequest::kQueryFieldNumber};
  std::string small;
  const grpc::ByteBuffer message(slices.data(), slices.size());
  EXPECT_EQ(wire::SplitMessage(wire::ViewOf(message), kNoLimit, absl::MakeSpan(&query, 1), &small),
            absl::OkStatus());
  EXPECT_EQ(query.size, bytes);
  EXPECT_EQ(query.offset, 6u);
}

TEST(WireTest, LimitsTheFieldsThatAreNotTensors) {
  v1::AttendRequest request;
  request.set_query(std::string(10000, 'q'));
  for (int i = 0; i < 1000; ++i) request.add_spans();
  const grpc::ByteBuffer message = InSlices(request.SerializeAsString(), {});
  v1::AttendRequest got;
  EXPECT_TRUE(Reassemble(message, 2000, &got));
  EXPECT_FALSE(Reassemble(message, 1999, &got));
  std::string small;
  const absl::Status status = wire::SplitMessage(wire::ViewOf(message), 1999, {}, &small);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than the 1999 bytes allowed"));
}

TEST(WireTest, AClaimedLengthAllocatesNothing) {
  // request_id with a length of 2 GiB - 1, and three bytes.
  const std::string bytes(
      "\x0a\xff\xff\xff\xff\x07"
      "abc",
      9);
  const grpc::ByteBuffer message = InSlices(bytes, {});
  std::string small;
  EXPECT_FALSE(wire::SplitMessage(wire::ViewOf(message), 1 << 20, {}, &small).ok());
  EXPECT_LE(small.capacity(), size_t{1} << 21);
}

// Same acceptance and same values as the generated parser, on random damage.
void ExpectAgreesOnDamaged(int messages) {
  const google::protobuf::LogSilencer no_complaints;
  std::mt19937 random(TestSeed());
  const std::string original = ExampleRequest().SerializeAsString();
  int accepted = 0;
  for (int i = 0; i < messages; ++i) {
    std::string bytes = original;
    for (unsigned change = 0; change <= random() % 4; ++change) {
      const size_t at = random() % (bytes.size() + 1);
      switch (random() % 4) {
        case 0:
          bytes.insert(at, 1, static_cast<char>(random()));
          break;
        case 1:
          bytes.erase(at, random() % 4);
          break;
        case 2:
          bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 30));
          break;
        default:
          if (at < bytes.size()) bytes[at] = static_cast<char>(random());
          break;
      }
      if (bytes.empty()) bytes = "\x08";
    }
    v1::AttendRequest want, got;
    const bool want_ok = want.ParseFromString(bytes);
    ASSERT_EQ(Reassemble(InSlices(bytes, {random() % bytes.size()}), kNoLimit, &got), want_ok)
        << ::testing::PrintToString(bytes);
    if (!want_ok) continue;
    ++accepted;
    want.DiscardUnknownFields();
    got.DiscardUnknownFields();
    ASSERT_EQ(got.SerializeAsString(), want.SerializeAsString()) << ::testing::PrintToString(bytes);
  }
  EXPECT_GT(accepted, messages / 100);  // else the damage proves little
}

TEST(WireTest, AgreesWithTheGeneratedParserOnDamagedMessages) { ExpectAgreesOnDamaged(10'000); }

TEST(WireStressTest, AgreesWithTheGeneratedParserOnDamagedMessages) {
  ExpectAgreesOnDamaged(100'000);
}

TEST(WireTest, FieldHeaderIsWhatTheGeneratedSerializerWrites) {
  for (const size_t size : {0, 1, 127, 128, 16383, 16384, 3'000'000}) {
    v1::AttendResponse response;
    response.set_output(std::string(size, 'o'));
    const std::string header = wire::FieldHeader(v1::AttendResponse::kOutputFieldNumber, size);
    if (size > 0) {
      EXPECT_EQ(header + response.output(), response.SerializeAsString());
    }
  }
}

}  // namespace
}  // namespace flashcore::server
