#include "server/transport/rpc/page_token.h"

#include <string>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

TEST(PageTokensTest, ATokenIsGoodForItsClientOnly) {
  const PageTokens tokens, of_another_process;
  for (const uint64_t position : {uint64_t{1}, uint64_t{257}, ~uint64_t{0}}) {
    const std::string token = tokens.Make("alice", position);
    EXPECT_EQ(tokens.Parse("alice", token), position);
    EXPECT_EQ(tokens.Parse("bob", token), std::nullopt);
    EXPECT_EQ(of_another_process.Parse("alice", token), std::nullopt);
  }
}

TEST(PageTokensTest, NothingElseIsAToken) {
  const PageTokens tokens;
  const std::string token = tokens.Make("alice", 0x1234);
  for (size_t i = 0; i < token.size(); ++i) {
    std::string other = token;
    other[i] = other[i] == '0' ? '1' : '0';
    EXPECT_EQ(tokens.Parse("alice", other), std::nullopt) << other;
  }
  const std::string zeros(32, '0');
  for (const std::string& other :
       {std::string(), std::string("x"), token + "0", zeros, token.substr(1), std::string(32, '\0'),
        "0x" + token.substr(2)}) {
    EXPECT_EQ(tokens.Parse("alice", other), std::nullopt) << other;
  }
}

}  // namespace
}  // namespace flashcore::server
