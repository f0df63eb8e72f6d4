#include "server/transport/grpc/guard/frame_counter.h"

#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/transport/grpc/guard/frames.h"

namespace flashcore::server {
namespace {

using testing::Frame;

const std::string kPreface =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(testing::kSettings, 0, 0, "");

TEST(FrameCounterTest, CountsInPiecesOfAnySize) {
  std::string bytes = kPreface;
  bytes += Frame(testing::kHeaders, 0, 1, std::string(300, 'h'));
  bytes += Frame(testing::kContinuation, 0, 1, std::string(200, 'h'));
  bytes += Frame(testing::kContinuation, testing::kEndHeaders, 1, std::string(70'000, 'h'));
  bytes += Frame(testing::kData, 0, 1, std::string(1000, '\x01'));
  bytes += Frame(testing::kHeaders, testing::kEndHeaders, 1, "trailers");
  bytes += Frame(testing::kHeaders, testing::kEndHeaders, 3, "");
  bytes += Frame(testing::kReset, 0, 3, "1234");
  bytes += Frame(testing::kReset, 0, 1, "1234");
  bytes += Frame(testing::kReset, 0, 1, "1234");
  bytes += Frame(testing::kPing, 0, 0, "12345678");
  bytes += Frame(testing::kHeaders, testing::kEndHeaders, 0x7fffffff, "");
  for (size_t size = 1; size <= bytes.size(); size = size < 50 ? size + 1 : 3 * size) {
    FrameCounter counter;
    for (size_t i = 0; i < bytes.size(); i += size) {
      counter.Read(absl::string_view(bytes).substr(i, size));
    }
    EXPECT_EQ(counter.bytes(), bytes.size()) << size;
    EXPECT_EQ(counter.frames(), 12U) << size;
    EXPECT_EQ(counter.pings(), 1U) << size;
    EXPECT_EQ(counter.streams(), 3U) << size;
    EXPECT_EQ(counter.resets(), 3U) << size;
    EXPECT_EQ(counter.longest_headers(), 70'500U) << size;
    EXPECT_FALSE(counter.settings_acknowledged()) << size;
  }
}

TEST(FrameCounterTest, HeadersCountBeforeTheyAreThere) {
  FrameCounter counter;
  counter.Read(kPreface);
  counter.Read(Frame(testing::kHeaders, 0, 1, std::string(300, 'h')).substr(0, 9));
  EXPECT_EQ(counter.streams(), 1U);
  EXPECT_EQ(counter.longest_headers(), 300U);
}

TEST(FrameCounterTest, SeesTheAcknowledgementOfSettings) {
  FrameCounter counter;
  counter.Read(kPreface);
  counter.Read(Frame(testing::kSettings, 0, 0, "123456"));
  EXPECT_FALSE(counter.settings_acknowledged());
  counter.Read(Frame(testing::kSettings, testing::kAckFlag, 0, ""));
  EXPECT_TRUE(counter.settings_acknowledged());
}

}  // namespace
}  // namespace flashcore::server
