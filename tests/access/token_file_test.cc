// The token file: what it accepts, and what its errors say.
#include "server/access/token_file.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// SHA-256 of "abc" and of "secret".
constexpr char kAbc[] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr char kSecret[] = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

TEST(TokenTableTest, FindsByToken) {
  const auto table = TokenTable::Parse(
      absl::StrCat("# owners\n\nalice:", kAbc, ":research,admin\r\n  bob:", kSecret, ":\n"));
  ASSERT_TRUE(table.ok()) << table.status();
  const TokenTable::Entry* alice = table->Find(DigestOf("abc"));
  ASSERT_NE(alice, nullptr);
  EXPECT_EQ(alice->name, "alice");
  EXPECT_THAT(alice->groups, ElementsAre("research", "admin"));
  const TokenTable::Entry* bob = table->Find(DigestOf("secret"));
  ASSERT_NE(bob, nullptr);
  EXPECT_EQ(bob->name, "bob");
  EXPECT_THAT(bob->groups, IsEmpty());
  for (const char* other : {"", "ab", "abcd", "ABC", kAbc}) {
    EXPECT_EQ(table->Find(DigestOf(other)), nullptr) << other;
  }
}

TEST(TokenTableTest, ANameMayHaveTwoTokens) {
  const auto table =
      TokenTable::Parse(absl::StrCat("alice:", kAbc, ":\nalice:", kSecret, ":research"));
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->Find(DigestOf("abc"))->name, "alice");
  EXPECT_EQ(table->Find(DigestOf("secret"))->name, "alice");
}

TEST(TokenTableTest, AnErrorNamesTheLine) {
  const std::string good = absl::StrCat("alice:", kAbc, ":\n");
  const auto error = [&](const std::string& line) {
    return std::string(TokenTable::Parse(good + line).status().message());
  };
  EXPECT_THAT(error("bob"), HasSubstr("line 2: want NAME:SHA256:GROUPS"));
  EXPECT_THAT(error(absl::StrCat("bob:", kSecret)), HasSubstr("line 2: want NAME:SHA256:GROUPS"));
  EXPECT_THAT(error(absl::StrCat("b b:", kSecret, ":")), HasSubstr("line 2: NAME: "));
  EXPECT_THAT(error(absl::StrCat(":", kSecret, ":")), HasSubstr("line 2: NAME: "));
  EXPECT_THAT(error(absl::StrCat(std::string(129, 'n'), ":", kSecret, ":")), HasSubstr("NAME: "));
  EXPECT_THAT(error("bob:secret:"), HasSubstr("line 2: SHA256: "));
  EXPECT_THAT(error(absl::StrCat("bob:", std::string(64, 'g'), ":")), HasSubstr("SHA256: "));
  EXPECT_THAT(error(absl::StrCat("bob:", kSecret, ":a,,b")), HasSubstr("line 2: GROUPS: "));
  EXPECT_THAT(error(absl::StrCat("bob:", kAbc, ":")), HasSubstr("the same token as in line 1"));
  EXPECT_THAT(TokenTable::Parse("# nothing\n").status().message(), HasSubstr("no token"));
  EXPECT_THAT(TokenTable::Parse("").status().message(), HasSubstr("no token"));
}

TEST(TokenTableTest, NoErrorRepeatsATokenThatSomebodyPutThereByMistake) {
  const auto table = TokenTable::Parse("alice:my-plain-token:research");
  EXPECT_EQ(std::string(table.status().message()).find("my-plain-token"), std::string::npos);
}

TEST(TokenTableTest, HasALimit) {
  std::string text;
  for (size_t i = 0; i <= TokenTable::kMaxTokens; ++i) {
    absl::StrAppend(&text, "n", i, ":", absl::Hex(i, absl::kZeroPad16), std::string(48, '0'),
                    ":\n");
  }
  EXPECT_THAT(TokenTable::Parse(text).status().message(), HasSubstr("more than 1024 tokens"));
  text.resize(text.rfind('\n', text.size() - 2) + 1);
  EXPECT_TRUE(TokenTable::Parse(text).ok());
}

}  // namespace
}  // namespace flashcore::server
