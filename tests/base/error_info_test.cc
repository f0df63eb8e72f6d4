#include "server/base/error_info.h"

#include <cstdint>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(ErrorInfoTest, AStatusKeepsItsInfoThroughCopiesAndNewTexts) {
  const absl::Status status =
      WithInfo(absl::ResourceExhaustedError("full"), reason::kKvFull,
               {{"free_bytes", uint64_t{1} << 40}, {"limit", "kv_bytes"}, {"empty", ""}});
  const absl::Status changed = WithMessage(status, "spans[2]: full");
  EXPECT_EQ(changed.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(changed.message(), "spans[2]: full");
  const std::optional<ErrorInfo> info = GetErrorInfo(changed);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "KV_FULL");
  EXPECT_THAT(info->metadata, ElementsAre(Pair("empty", ""), Pair("free_bytes", "1099511627776"),
                                          Pair("limit", "kv_bytes")));
}

TEST(ErrorInfoTest, TheLastInfoCounts) {
  const absl::Status status =
      WithInfo(WithInfo(absl::ResourceExhaustedError("full"), reason::kKvFull, {{"used_bytes", 1}}),
               reason::kQueueFull);
  const std::optional<ErrorInfo> info = GetErrorInfo(status);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "QUEUE_FULL");
  EXPECT_THAT(info->metadata, IsEmpty());
}

TEST(ErrorInfoTest, OtherStatusesHaveNone) {
  EXPECT_FALSE(GetErrorInfo(absl::OkStatus()).has_value());
  EXPECT_FALSE(GetErrorInfo(absl::InternalError("a bug")).has_value());
  EXPECT_FALSE(GetErrorInfo(WithMessage(absl::InternalError("a bug"), "a bug")).has_value());
}

}  // namespace
}  // namespace flashcore::server
