#include "server/transport/rpc/take_spans.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "server/transport/rpc/unknown_fields.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

std::string Id(size_t bytes) { return std::string(bytes, 'i'); }

v1::AttendRequest Example(size_t id_bytes) {
  v1::AttendRequest request;
  request.set_request_id("example");
  request.mutable_mask()->set_window_left(-5);
  request.mutable_query_range()->set_offset(300);
  for (int i = 0; i < 3; ++i) {
    v1::Span* span = request.add_spans();
    span->set_query_rows(1u << (15 * i));
    if (i > 0) span->set_kv_rows(7);
    span->set_sequence_id(Id(i == 2 ? id_bytes : 16));
    if (i == 1) span->set_expected_length(uint64_t{1} << 40);
  }
  request.set_layer(3);
  return request;
}

bool IsSame(const SpanShape& got, const v1::Span& want) {
  const SequenceName name(want.sequence_id());
  return got.query_rows == want.query_rows() && got.kv_rows == want.kv_rows() &&
         got.sequence_id.size() == name.size() && got.sequence_id.id() == name.id() &&
         got.expected_length.has_value() == want.has_expected_length() &&
         got.expected_length.value_or(0) == want.expected_length();
}

// Empty if TakeSpans and the generated parser make the same of `message`; `*accepted`: they accept
// it.
std::string Difference(const std::string& message, bool* accepted) {
  v1::AttendRequest want, rest;
  *accepted = want.ParseFromString(message);
  std::string small = message;
  std::vector<SpanShape> spans;
  int unknown = 0;
  const bool taken = TakeSpans(&small, &spans, &unknown) && rest.ParseFromString(small);
  if (taken != *accepted) return taken ? "only TakeSpans accepts it" : "TakeSpans refuses it";
  if (!taken) return "";
  if (rest.spans_size() != 0) return "spans are left";
  if (spans.size() != static_cast<size_t>(want.spans_size())) return "another number of spans";
  for (size_t i = 0; i < spans.size(); ++i) {
    if (!IsSame(spans[i], want.spans(static_cast<int>(i)))) return "another span";
  }
  const bool any_unknown =
      std::any_of(want.spans().begin(), want.spans().end(),
                  [](const v1::Span& span) { return !CheckKnownFields(span).ok(); });
  if ((unknown != 0) != any_unknown) return "a field unknown to one alone";
  want.clear_spans();
  return rest.SerializeAsString() == want.SerializeAsString() ? "" : "other fields differ";
}

// A message with one span of these bytes.
std::string OneSpan(const std::string& span) {
  std::string message = "\x12";
  for (size_t size = span.size(); true; size >>= 7) {
    message.push_back(static_cast<char>(size < 0x80 ? size : (size & 0x7F) | 0x80));
    if (size < 0x80) return message + span;
  }
}

class TakeSpansTest : public ::testing::Test {
 protected:
  void Expect(bool want, const std::string& message) {
    bool accepted = false;
    EXPECT_EQ(Difference(message, &accepted), "") << ::testing::PrintToString(message);
    EXPECT_EQ(accepted, want) << ::testing::PrintToString(message);
  }

  const google::protobuf::LogSilencer silent_;
};

TEST_F(TakeSpansTest, TakesTheSpansAndLeavesTheRest) {
  for (const size_t id_bytes : {0, 1, 15, 16, 17, 100}) {
    Expect(true, Example(id_bytes).SerializeAsString());
  }
  Expect(true, "");
  Expect(true, OneSpan(""));
}

TEST_F(TakeSpansTest, TheLastOfRepeatedFieldsCounts) {
  Expect(true, OneSpan("\x08\x01\x08\x02\x1a\x02"
                       "ab"
                       "\x1a\x01"
                       "c"));
  Expect(true, OneSpan("\x1a\x10" + Id(16) + std::string("\x1a\x00", 2)));
}

TEST_F(TakeSpansTest, NumbersAreCutToTheirType) {
  Expect(true, OneSpan("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"));
  Expect(true, OneSpan("\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"));
  Expect(false, OneSpan("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x80\x01"));
}

TEST_F(TakeSpansTest, FieldsOfOtherTypesAndNumbersAreSkipped) {
  Expect(true, OneSpan("\x09"
                       "12345678"
                       "\x0d"
                       "1234"
                       "\x0a\x02"
                       "ab"));
  Expect(true, OneSpan("\x18\x05\x1d"
                       "1234"
                       "\x22\x01"
                       "x"
                       "\x78\x01"));
  Expect(true, OneSpan("\x7b\x08\x01\x7c\x10\x09"));  // a group
  Expect(true, OneSpan("\x0b\x0c\x08\x04"));          // one with a known number
  Expect(true, std::string("\x10\x05\x15"
                           "1234",
                           7));  // spans, but not length-delimited
}

TEST_F(TakeSpansTest, TellsTheNumberOfAnUnknownField) {
  const std::vector<std::pair<std::string, int>> spans = {{"\x08\x01", 0},
                                                          {"\x28\x01", 5},
                                                          {"\x09"
                                                           "12345678",
                                                           1},
                                                          {"\x7b\x7c", 15}};
  for (const auto& [span, number] : spans) {
    std::string message = OneSpan(span);
    std::vector<SpanShape> taken;
    int unknown = -1;
    ASSERT_TRUE(TakeSpans(&message, &taken, &unknown));
    EXPECT_EQ(unknown, number);
  }
}

TEST_F(TakeSpansTest, RefusesWhatIsNotWellFormed) {
  for (const char* span :
       {"\x08", "\x08\x80",
        "\x1a\x05"
        "abc",
        "\x1a\xff\xff\xff\xff\x0f", "\x01\x01", "\x0c", "\x0b", "\x0b\x14", "\x0e", "\x0f",
        "\x09"
        "1234567",
        "\x0d"
        "123",
        "\x88\x80\x80\x80\x80\x00\x01", "\x1a\x80\x80\x80\x80\x80\x00"}) {
    Expect(false, OneSpan(span));
  }
  Expect(false, "\x12\x05\x08\x01");
  Expect(false, "\x12");
}

TEST_F(TakeSpansTest, GroupsMayBeAsDeepAsTheGeneratedParserAllows) {
  for (const size_t depth : {98, 99, 100, 101}) {
    bool accepted = false;
    const std::string message = OneSpan(std::string(depth, '\x7b') + std::string(depth, '\x7c'));
    EXPECT_EQ(Difference(message, &accepted), "") << depth;
    EXPECT_EQ(accepted, depth < 100) << depth;
  }
}

TEST_F(TakeSpansTest, AgreesWithTheGeneratedParserOnDamagedMessages) {
  std::mt19937 random(TestSeed());
  const std::string original = Example(16).SerializeAsString();
  int accepted_messages = 0;
  for (int i = 0; i < 100'000; ++i) {
    std::string message = original;
    for (uint32_t change = 0; change <= random() % 3; ++change) {
      const size_t at = random() % message.size();
      switch (random() % 3) {
        case 0:
          message[at] = static_cast<char>(random());
          break;
        case 1:
          message.erase(at, 1 + random() % 3);
          break;
        default:
          message.insert(at, 1, static_cast<char>(random() % 40));
      }
    }
    bool accepted = false;
    ASSERT_EQ(Difference(message, &accepted), "") << ::testing::PrintToString(message);
    accepted_messages += accepted ? 1 : 0;
  }
  EXPECT_GT(accepted_messages, 1000);
}

}  // namespace
}  // namespace flashcore::server
