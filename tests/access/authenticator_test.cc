// The client that a trusted proxy calls for.
#include "server/access/authenticator.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// SHA-256 of "abc" and of "secret".
constexpr char kProxyLine[] =
    "proxy:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad:operators\n";
constexpr char kOtherLine[] =
    "other:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b:\n";
constexpr char kForwarded[] = "x-forwarded-client-cert";

// A call without a certificate.
class FakeClaims final : public CallerClaims {
 public:
  void Add(const char* key, std::string value) { metadata_.emplace(key, std::move(value)); }

  Values Metadata(const char* key) const override {
    const auto [begin, end] = metadata_.equal_range(key);
    Values values;
    for (auto it = begin; it != end; ++it) values.push_back(it->second);
    return values;
  }
  std::string NameInCertificate(CertificateName /*kind*/) const override { return ""; }

 private:
  std::multimap<std::string, std::string> metadata_;
};

class AuthenticatorTest : public ::testing::Test {
 protected:
  AuthenticatorTest() { SetTokens(std::string(kProxyLine) + kOtherLine); }

  void SetTokens(const std::string& lines) {
    authenticator_.SetTokens(TokenTable::Parse(lines).value());
  }
  // A call with a token and, unless it is null, the proxy's header.
  absl::StatusOr<Identity> Identify(const char* token, const char* forwarded) {
    FakeClaims call;
    call.Add("authorization", std::string("Bearer ") + token);
    if (forwarded != nullptr) call.Add(kForwarded, forwarded);
    return authenticator_.Identify(call, Peer{"ipv4:10.0.0.1:4711", std::nullopt});
  }
  Metrics metrics_{{}};
  Authenticator authenticator_{{false, false, false, {"token:proxy", "cert:edge"}}, &metrics_};
};

TEST_F(AuthenticatorTest, AForwardedClientHasTheProxysTokenAndNotItsGroups) {
  const absl::StatusOr<Identity> proxy = Identify("abc", nullptr);
  ASSERT_TRUE(proxy.ok()) << proxy.status();
  EXPECT_EQ(proxy->name, "token:proxy");
  EXPECT_THAT(proxy->groups, ElementsAre("operators"));

  const absl::StatusOr<Identity> client = Identify("abc", "URI=spiffe://c");
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(client->name, "cert:spiffe://c");
  EXPECT_THAT(client->groups, IsEmpty());
  EXPECT_EQ(client->token, proxy->token);
}

TEST_F(AuthenticatorTest, RevokingTheProxysTokenRevokesItsClients) {
  const Identity client = Identify("abc", "URI=spiffe://c").value();
  EXPECT_EQ(authenticator_.CheckStillValid(client), absl::OkStatus());
  SetTokens(kOtherLine);
  EXPECT_EQ(authenticator_.CheckStillValid(client).code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AuthenticatorTest, AChangeOfGroupsEndsWhatHasTheOldOnes) {
  const Identity before = Identify("abc", nullptr).value();
  std::string fewer = kProxyLine;
  fewer.replace(fewer.find("operators"), 9, "readers");
  SetTokens(fewer);
  EXPECT_EQ(authenticator_.CheckStillValid(before).code(), absl::StatusCode::kUnauthenticated);
  const Identity after = Identify("abc", nullptr).value();
  EXPECT_THAT(after.groups, ElementsAre("readers"));
  EXPECT_EQ(authenticator_.CheckStillValid(after), absl::OkStatus());
}

TEST_F(AuthenticatorTest, AChangeOfNameEndsWhatHasTheOldOne) {
  const Identity before = Identify("abc", nullptr).value();
  std::string renamed = kProxyLine;
  renamed.replace(renamed.find("proxy"), 5, "gateway");
  SetTokens(renamed);
  EXPECT_EQ(authenticator_.CheckStillValid(before).code(), absl::StatusCode::kUnauthenticated);
  const Identity after = Identify("abc", nullptr).value();
  EXPECT_EQ(after.name, "token:gateway");
  EXPECT_EQ(authenticator_.CheckStillValid(after), absl::OkStatus());
}

TEST_F(AuthenticatorTest, OnlyOfATrustedProxyTheHeaderCounts) {
  for (const char* header : {"URI=spiffe://c", "garbage"}) {
    const absl::StatusOr<Identity> other = Identify("secret", header);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(other->name, "token:other");
  }
}

TEST_F(AuthenticatorTest, TheLastClientThatIsNoProxyCounts) {
  EXPECT_EQ(Identify("abc", "URI=spiffe://admin,URI=spiffe://c")->name, "cert:spiffe://c");
  EXPECT_EQ(Identify("abc", "URI=spiffe://c,DNS=edge")->name, "cert:spiffe://c");
  EXPECT_EQ(Identify("abc", "DNS=edge")->name, "cert:edge");
}

TEST_F(AuthenticatorTest, ATrustedProxyIsKnownByItsAddressOrUser) {
  const Authenticator by_peer({false, false, false, {"host:10.0.0.1", "host:[::1]", "uid:7"}},
                              &metrics_);
  EXPECT_TRUE(by_peer.TrustsPeer({"ipv4:10.0.0.1:4711", std::nullopt}));
  EXPECT_FALSE(by_peer.TrustsPeer({"ipv4:10.0.0.12:4711", std::nullopt}));
  EXPECT_TRUE(by_peer.TrustsPeer({"ipv6:%5B::1%5D:4711", 8}));
  EXPECT_TRUE(by_peer.TrustsPeer({"unix:", 7}));
  EXPECT_FALSE(by_peer.TrustsPeer({"unix:", 8}));
  EXPECT_FALSE(authenticator_.TrustsPeer({"ipv4:10.0.0.1:4711", 7}));
}

TEST_F(AuthenticatorTest, NobodyEntersWhereTokensAreNeededButNoneAreThere) {
  Authenticator::Options options;
  options.needs_tokens = true;
  const Authenticator closed(options, &metrics_);
  for (const char* token : {"", "Bearer abc"}) {
    FakeClaims call;
    if (*token != '\0') call.Add("authorization", token);
    EXPECT_EQ(closed.Identify(call, Peer{"unix:", std::nullopt}).status().code(),
              absl::StatusCode::kUnauthenticated)
        << token;
  }
}

TEST_F(AuthenticatorTest, AHeaderThatNamesNobodyIsRefused) {
  const std::string long_name = "URI=" + std::string(513, 'a');
  const std::vector<const char*> headers = {"garbage", "Hash=ab", "URI=\"a\nb\"",
                                            long_name.c_str()};
  for (const char* header : headers) {
    EXPECT_EQ(Identify("abc", header).status().code(), absl::StatusCode::kUnauthenticated)
        << header;
  }
}

}  // namespace
}  // namespace flashcore::server
