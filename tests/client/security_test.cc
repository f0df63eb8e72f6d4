// TLS options and tokens of a client: what it refuses, and what it sends.
#include "client/cpp/security.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

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

TEST_F(SecurityTest, TargetsThatGrpcWouldMisreadAreRefused) {
  const std::string path = absl::StrCat("/", std::string(106, 'a'));
  for (const std::string& target :
       {std::string("127.0.0.1:1"), std::string("[::1]:1"), std::string("unix:a"),
        absl::StrCat("unix:", path), std::string("unix:///a"), std::string("unix-abstract:a"),
        std::string("dns:///a:1"), std::string("ipv4:127.0.0.1:1,127.0.0.2:1")}) {
    EXPECT_EQ(CreateError(target, {}), "");
  }
  constexpr char kNoAddress[] =
      "no host, an IPv6 host without brackets, no port, or a port that is not from 1 to 65535";
  const std::pair<std::string, std::string> refused[] = {
      {"", "empty"},
      {"127.0.0.1", kNoAddress},
      {"localhost:", kNoAddress},
      {"::1:7070", kNoAddress},
      {"[::1]", kNoAddress},
      {":7070", kNoAddress},
      {"a:0", kNoAddress},
      {"a:65536", kNoAddress},
      {"a:http", kNoAddress},
      {"dns:a", kNoAddress},
      {"dns:///a", kNoAddress},
      {"dns://a", kNoAddress},
      {"ipv4:127.0.0.1", kNoAddress},
      {"ipv4:127.0.0.1:1,", kNoAddress},
      {"http://127.0.0.1:7070", "a scheme: leave http:// away"},
      {"grpc://a:1", "a scheme: leave grpc:// away"},
      {" a:1", "a space, a control character or other than ASCII in it"},
      {"a:1\n", "a space, a control character or other than ASCII in it"},
      {"/run/a.sock", "a '/' in it"},
      {"unix:", "no path"},
      {"unix://a", "the path is not absolute"},
      {absl::StrCat("unix:", path, "a"), "the path has 108 bytes, and a Unix socket's at most 107"},
      {"unix-abstract:", "no name"},
      {"local:a", "the path is not absolute"},
  };
  for (const auto& [target, problem] : refused) {
    EXPECT_THAT(CreateError(target, {}),
                testing::StartsWith(absl::StrCat("target '", target, "': ", problem, "; want ")));
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

// A proxy that every variable names for as long as it lives, and that takes no connection by
// itself.
class Proxy {
 public:
  Proxy() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(socket_, generic, size) != 0 || listen(socket_, 8) != 0 ||
        getsockname(socket_, generic, &size) != 0) {
      std::abort();
    }
    const std::string url = absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port));
    for (const char* name : kVariables) setenv(name, url.c_str(), 1);
  }
  ~Proxy() {
    for (const char* name : kVariables) unsetenv(name);
    close(socket_);
  }

  // The first bytes that came; none if nobody connects until `deadline`.
  std::string Take(absl::Time deadline) const {
    const auto ready = [deadline](int fd) {
      pollfd readable = {fd, POLLIN, 0};
      const auto left = absl::ToInt64Milliseconds(deadline - absl::Now());
      return poll(&readable, 1, static_cast<int>(std::max<int64_t>(0, left))) == 1;
    };
    if (!ready(socket_)) return "";
    const int connection = accept(socket_, nullptr, nullptr);
    std::string request(4096, '\0');
    const ssize_t got = ready(connection) ? read(connection, request.data(), request.size()) : 0;
    close(connection);
    return request.substr(0, static_cast<size_t>(std::max<ssize_t>(0, got)));
  }

 private:
  static constexpr const char* kVariables[] = {"http_proxy", "https_proxy", "grpc_proxy"};
  const int socket_;
};

TEST_F(SecurityTest, PlaintextTakesNoProxy) {
  FakeServer server;
  const Proxy proxy;
  ClientOptions token;
  token.token_file = Write("token", "secret\n");
  ClientOptions asked;
  asked.http_proxy = true;
  for (const ClientOptions& options : {ClientOptions(), token, asked}) {
    const auto info = (*Client::Create(server.target(), options))->GetServerInfo();
    EXPECT_TRUE(info.ok()) << info.status();
  }
  // A plaintext address that is not loopback, like that of any other host.
  const std::string port = server.target().substr(server.target().rfind(':'));
  EXPECT_TRUE((*Client::Create("0.0.0.0" + port))->GetServerInfo().ok());
  EXPECT_THAT(CreateError("0.0.0.0" + port, asked), HasSubstr("http_proxy: set for 0.0.0.0"));
  ClientOptions argument;
  argument.channel_arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 1);
  EXPECT_THAT(CreateError(server.target(), argument), HasSubstr("want http_proxy"));
  EXPECT_EQ(proxy.Take(absl::Now()), "");
}

TEST_F(SecurityTest, TlsTakesAProxyOnlyIfAsked) {
  FakeServer server;  // without TLS: no call succeeds
  const Proxy proxy;
  const std::string target = "0.0.0.0" + server.target().substr(server.target().rfind(':'));
  ClientOptions options;
  options.tls = TlsOptions();
  options.retry.max_attempts = 1;
  options.token_file = Write("token", "secret\n");
  EXPECT_FALSE((*Client::Create(target, options))->GetServerInfo().ok());
  EXPECT_EQ(proxy.Take(absl::Now()), "");
  options.http_proxy = true;
  std::string request;
  std::thread take([&] { request = proxy.Take(absl::Now() + absl::Seconds(30)); });
  EXPECT_FALSE((*Client::Create(target, options))->GetServerInfo().ok());
  take.join();
  EXPECT_THAT(request, StartsWith("CONNECT " + target));
  EXPECT_THAT(request, Not(HasSubstr("secret")));
}

TEST_F(SecurityTest, KnowsWhatMayTakeAProxy) {
  ClientOptions options;
  options.tls = TlsOptions();
  EXPECT_FALSE(client::UsesHttpProxy("attention.example:1", options));
  options.http_proxy = true;
  for (const char* target : {"attention.example:1", "10.0.0.1:1", "dns:///attention.example:1"}) {
    EXPECT_TRUE(client::UsesHttpProxy(target, options)) << target;
  }
  for (const char* target : {"127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/a", "dns:localhost:1",
                             "dns:///127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1"}) {
    EXPECT_FALSE(client::UsesHttpProxy(target, options)) << target;
  }
  options.tls.reset();
  EXPECT_FALSE(client::UsesHttpProxy("attention.example:1", options));
}

constexpr char kCertificate[] = "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n";
constexpr char kKey[] = "-----BEGIN EC PRIVATE KEY-----\nAA\n-----END EC PRIVATE KEY-----\n";

TEST_F(SecurityTest, RefusesFilesThatAreNoText) {
  const std::string content = absl::StrCat("secret\n", kCertificate, kKey);
  struct {
    std::string path;
    const char* problem;
  } const cases[] = {
      {"/none", "cannot be read: No such file"},
      {::testing::TempDir(), "cannot be read: Is a directory"},
      {Write("empty", ""), "want a token|no BEGIN"},
      {Write("blank", " \n"), "want a token|no BEGIN"},
      {Write("comment", "# nothing here\n"), "want a token|no BEGIN"},
      {Write("bom", "\xEF\xBB\xBF" + content), "begins with a byte order mark"},
      {Write("utf16", "\xFF\xFEs"), "has bytes of UTF-16"},
      {Write("utf16le", std::string("s\0e\0", 4)), "has bytes of UTF-16"},
      {Write("large", std::string(1 << 20, 'x') + "\n" + content), "is larger than 1048576"},
      {"/dev/zero", "is larger than 1048576"},
  };
  for (const auto& [path, problem] : cases) {
    const std::vector<std::string> problems = absl::StrSplit(problem, '|');
    ClientOptions options;
    options.token_file = path;
    EXPECT_THAT(CreateError("localhost:1", options), HasSubstr(path + ": " + problems.front()));
    options.token_file = "";
    const std::string certificate = Write("cert", kCertificate), key = Write("key", kKey);
    for (const TlsOptions& tls :
         {TlsOptions{path}, TlsOptions{"", path, key}, TlsOptions{"", certificate, path}}) {
      options.tls = tls;
      EXPECT_THAT(CreateError("localhost:1", options), HasSubstr(path + ": " + problems.back()));
    }
  }
}

TEST_F(SecurityTest, RefusesPemThatIsCutOrOfAnotherKind) {
  const std::string certificate = Write("cert", kCertificate), key = Write("key", kKey);
  const std::string cut = Write("cut", absl::StrCat(kCertificate, std::string(kKey).substr(0, 50)));
  ClientOptions options;
  options.tls = TlsOptions{"", certificate, key};
  EXPECT_EQ(CreateError("localhost:1", options), "");
  options.tls = TlsOptions{"", key, certificate};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr(key + ": no BEGIN CERTIFICATE"));
  options.tls = TlsOptions{"", certificate, certificate};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("no BEGIN PRIVATE KEY"));
  options.tls = TlsOptions{cut};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("ends before END EC PRIVATE KEY"));
}

TEST_F(SecurityTest, RefusesFilesThatDoNotFit) {
  ClientOptions options;
  for (const char* token : {"two words\n", "a\x01", "caf\xE9"}) {
    options.token_file = Write("token", token);
    EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("want a token")) << token;
  }
  options.token_file = Write("token", std::string(4097, 'x'));
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("want a token"));
  options.token_file = Write("token", "alice:" + std::string(64, '0') + ":\n");
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("list of digests"));
  options.token_file = "";
  options.tls = TlsOptions{"", "/cert"};
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("cert_file and key_file"));
  options.tls = TlsOptions();
  options.credentials = grpc::InsecureChannelCredentials();
  EXPECT_THAT(CreateError("localhost:1", options), HasSubstr("credentials: "));
  options.tls.reset();
  options.http_proxy = true;
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

TEST_F(SecurityTest, AnUnknownVariableIsNamedOnce) {
  setenv("FLASHCORE_CLIENT_TOKEN", "secret", 1);
  setenv("FLASHCORE_CLIENT_KV_BYTES", "0", 1);  // of the server
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    ClientOptions options;
    ReadEnvironment(&options);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  unsetenv("FLASHCORE_CLIENT_TOKEN");
  unsetenv("FLASHCORE_CLIENT_KV_BYTES");
  EXPECT_THAT(said, HasSubstr("unknown environment variable FLASHCORE_CLIENT_TOKEN;"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_THAT(said, ::testing::Not(HasSubstr("secret")));
}

}  // namespace
}  // namespace flashcore
