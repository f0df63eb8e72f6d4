// TLS options and tokens of a client: what it refuses, and what it sends.
#include "client/cpp/security.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

class SecurityTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& content) {
    std::string path = absl::StrCat(::testing::TempDir(), "security_test.", getpid(), ".", name);
    std::ofstream(path) << content;
    return path;
  }
  static std::string CreateError(const std::string& target, const ClientOptions& options) {
    return std::string(Client::Create(target, options).status().message());
  }
};

TEST_F(SecurityTest, KnowsWhatStaysOnTheHost) {
  for (const char* target :
       {"unix:/a", "unix:a", "unix-abstract:a", "127.0.0.1:1", "127.1.2.3:1", "localhost:1",
        "[::1]:1", "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1"}) {
    EXPECT_TRUE(client::StaysOnHost(target)) << target;
  }
  for (const char* target :
       {"10.0.0.1:1", "128.0.0.1:1", "localhost.example:1", "localhost", "unixbox:1", "[::2]:1",
        "0.0.0.0:1", "[::]:1", "127.0.0.1.example:1", "ipv4:127.0.0.1:1,10.0.0.1:1",
        "dns:///localhost:1", "xds:///localhost", ""}) {
    EXPECT_FALSE(client::StaysOnHost(target)) << target;
  }
}

TEST_F(SecurityTest, ATokenGoesWithEveryCallAndIsReadAgain) {
  FakeServer server;
  ClientOptions options;
  options.token_file = Write("token", "first\nsecond line\n");
  auto client = Client::Create(server.target(), options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->GetServerInfo().ok());
  EXPECT_EQ(server.metadata("authorization").back(), "Bearer first");
  Write("token", "second\n");
  const auto end = absl::Now() + absl::Seconds(60);
  while (server.metadata("authorization").back() != "Bearer second" && absl::Now() < end) {
    ASSERT_TRUE((*client)->GetServerInfo().ok());
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(server.metadata("authorization").back(), "Bearer second");
}

TEST_F(SecurityTest, ATokenIsReadAtMostOnceASecond) {
  absl::Time now = absl::UnixEpoch();
  const auto token = *client::TokenFile::Open(Write("token", "first\n"), [&] { return now; });
  EXPECT_EQ(token->Token(), "first");
  Write("token", "second\n");
  now += absl::Milliseconds(999);
  EXPECT_EQ(token->Token(), "first");
  now += absl::Milliseconds(1);
  EXPECT_EQ(token->Token(), "second");
  // A file that is being replaced changes nothing.
  Write("token", "");
  now += absl::Seconds(1);
  EXPECT_EQ(token->Token(), "second");
  Write("token", "third\n");
  EXPECT_EQ(token->Token(), "second");
  now += absl::Seconds(1);
  EXPECT_EQ(token->Token(), "third");
}

TEST_F(SecurityTest, ATokenDoesNotLeaveTheHostInClearText) {
  ClientOptions options;
  options.token_file = Write("token", "secret\n");
  EXPECT_THAT(CreateError("10.0.0.1:7070", options), HasSubstr("in clear text"));
  EXPECT_THAT(CreateError("dns:///localhost:7070", options), HasSubstr("in clear text"));
  EXPECT_THAT(CreateError("unixbox:7070", options), HasSubstr("in clear text"));
  EXPECT_EQ(CreateError("127.0.0.1:7070", options), "");
  EXPECT_EQ(CreateError("unix:/tmp/s", options), "");
  options.tls = TlsOptions();
  EXPECT_EQ(CreateError("10.0.0.1:7070", options), "");
  EXPECT_EQ(CreateError("unix:/tmp/s", options), "");
}

// $http_proxy would take a connection to loopback through the proxy, in clear text.
TEST_F(SecurityTest, ATokenDoesNotGoToAnHttpProxy) {
  FakeServer server;
  ClientOptions options;
  options.token_file = Write("token", "secret\n");
  setenv("http_proxy", "http://127.0.0.1:1", 1);
  const auto info = (*Client::Create(server.target(), options))->GetServerInfo();
  unsetenv("http_proxy");
  EXPECT_TRUE(info.ok()) << info.status();
}

TEST_F(SecurityTest, RefusesFilesThatDoNotFit) {
  ClientOptions options;
  options.token_file = "/none";
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("/none: "));
  options.token_file = Write("token", " \n");
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("want a token"));
  options.token_file = Write("token", "two words\n");
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("want a token"));
  options.token_file = Write("token", "alice:" + std::string(64, '0') + ":\n");
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("list of digests"));
  options.token_file = "";
  options.tls = TlsOptions{"/none"};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("/none: cannot be read"));
  options.tls->ca_file = Write("ca", "no certificate");
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("no BEGIN CERTIFICATE"));
  options.tls = TlsOptions{"", "/cert"};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("cert_file and key_file"));
  options.tls = TlsOptions();
  options.credentials = grpc::InsecureChannelCredentials();
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("credentials: "));
}

TEST_F(SecurityTest, TheEnvironmentSetsWhatIsUnset) {
  setenv("FLASHCORE_CLIENT_TLS_CA_FILE", "/ca", 1);
  setenv("FLASHCORE_CLIENT_TLS_SERVER_NAME", "name", 1);
  setenv("FLASHCORE_CLIENT_TOKEN_FILE", "/token", 1);
  ClientOptions options;
  options.token_file = "/mine";
  ReadEnvironment(&options);
  for (const char* name : {"TLS_CA_FILE", "TLS_SERVER_NAME", "TOKEN_FILE"}) {
    unsetenv((std::string("FLASHCORE_CLIENT_") + name).c_str());
  }
  ASSERT_TRUE(options.tls.has_value());
  EXPECT_EQ(options.tls->ca_file, "/ca");
  EXPECT_EQ(options.tls->server_name, "name");
  EXPECT_EQ(options.token_file, "/mine");
  ClientOptions untouched;
  ReadEnvironment(&untouched);
  EXPECT_FALSE(untouched.tls.has_value());
}

}  // namespace
}  // namespace flashcore
