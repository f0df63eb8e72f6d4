#include "server/base/error_info.h"

#include <optional>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

TEST(ErrorInfoTest, AStatusCarriesIt) {
  const absl::Status status =
      WithInfo(absl::ResourceExhaustedError("full"), reason::kQuotaExceeded,
               {{"limit", "client_kv_bytes"}, {"used", uint64_t{7}}, {"empty", ""}, {"x", "a=b"}});
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(status.message(), "full");
  const std::optional<ErrorInfo> info = InfoOf(status);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "QUOTA_EXCEEDED");
  ASSERT_EQ(info->metadata.size(), 4U);
  EXPECT_EQ(info->metadata[0].key, "limit");
  EXPECT_EQ(info->metadata[0].value, "client_kv_bytes");
  EXPECT_EQ(info->metadata[1].value, "7");
  EXPECT_EQ(info->metadata[2].value, "");
  EXPECT_EQ(info->metadata[3].value, "a=b");
}

TEST(ErrorInfoTest, AReasonNeedsNoMetadata) {
  const auto info = InfoOf(WithInfo(absl::NotFoundError("gone"), reason::kRegionLost));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "REGION_LOST");
  EXPECT_TRUE(info->metadata.empty());
}

TEST(ErrorInfoTest, AnotherMessageKeepsIt) {
  const absl::Status status =
      WithMessage(WithInfo(absl::NotFoundError("gone"), reason::kLeaseLost), "lease: gone");
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(status.message(), "lease: gone");
  EXPECT_EQ(InfoOf(status)->reason, "LEASE_LOST");
}

TEST(ErrorInfoTest, MostStatusesHaveNone) {
  EXPECT_FALSE(InfoOf(absl::OkStatus()).has_value());
  EXPECT_FALSE(InfoOf(absl::InternalError("x")).has_value());
  EXPECT_FALSE(InfoOf(WithMessage(absl::InternalError("x"), "y")).has_value());
}

}  // namespace
}  // namespace flashcore::server
