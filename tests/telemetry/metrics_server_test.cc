#include "server/telemetry/metrics_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/telemetry/metrics.h"
#include "tests/telemetry/example_metrics.h"
#include "tests/telemetry/http_get.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class MetricsTokenTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteFile("first\n"); }
  void TearDown() override { std::remove(file_.c_str()); }

  void WriteFile(const std::string& content) { std::ofstream(file_) << content; }
  absl::Status Start() {
    MetricsServer::Options options = {"127.0.0.1:0", file_};
    options.token_reload_failures = &metrics_.metrics_token_reload_failures;
    auto server = MetricsServer::Start(std::move(options), &metrics_);
    if (server.ok()) server_ = *std::move(server);
    return server.status();
  }
  std::string Scrape(const std::string& header) {
    return HttpGet(server_->port(), "/metrics", header);
  }

  const std::string file_ = absl::StrCat(::testing::TempDir(), "metrics_token.", getpid());
  Metrics metrics_{ExampleOptions()};
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsTokenTest, IsWhatAScrapeNeeds) {
  ASSERT_TRUE(Start().ok());
  const std::string challenge = "Bearer realm=\"flashcore\"";
  const auto expect_refused = [&](const std::string& header, const std::string& want) {
    const std::string response = Scrape(header);
    EXPECT_THAT(response, StartsWith("HTTP/1.1 401 Unauthorized\r\n")) << header;
    EXPECT_EQ(HttpHeader(response, "WWW-Authenticate"), want) << header;
    EXPECT_EQ(HttpHeader(response, "Cache-Control"), "no-store") << header;
    EXPECT_THAT(response, Not(HasSubstr("flashcore_"))) << header;
  };
  for (const char* none : {"", "Bearer", "Bearer ", "Basic first", "first", "Bearerfirst"}) {
    expect_refused(*none == '\0' ? "" : absl::StrCat("Authorization: ", none, "\r\n"), challenge);
  }
  for (const char* wrong : {"Bearer firsT", "Bearer first2", "Bearer firs", "bearer x",
                            "Bearer first first", "Bearer Bearer first"}) {
    expect_refused(absl::StrCat("Authorization: ", wrong, "\r\n"),
                   challenge + ", error=\"invalid_token\"");
  }
  // RFC 9110, 11.1: the scheme's case does not count, and spaces may follow it.
  for (const char* right : {"Bearer first", "bearer first", "BEARER   first", "Bearer first "}) {
    EXPECT_THAT(Scrape(absl::StrCat("Authorization: ", right, "\r\n")),
                StartsWith("HTTP/1.1 200 OK\r\n"))
        << right;
  }
}

TEST_F(MetricsTokenTest, IsWhatHeadNeeds) {
  ASSERT_TRUE(Start().ok());
  const auto head = [&](const std::string& header) {
    return HttpExchange(server_->port(),
                        absl::StrCat("HEAD /metrics?x HTTP/1.1\r\nHost: h\r\n", header, "\r\n"));
  };
  EXPECT_THAT(head(""), StartsWith("HTTP/1.1 401"));
  const std::string allowed = head("Authorization: Bearer first\r\n");
  EXPECT_THAT(allowed, StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(HttpHeader(allowed, "Content-Type"), "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_EQ(HttpBody(allowed), "");
}

TEST_F(MetricsTokenTest, IsNotWhatAProbeNeeds) {
  ASSERT_TRUE(Start().ok());
  EXPECT_THAT(HttpGet(server_->port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet(server_->port(), "/readyz"), StartsWith("HTTP/1.1 200"));
}

TEST_F(MetricsTokenTest, MayBeReplaced) {
  ASSERT_TRUE(Start().ok());
  WriteFile("second");
  EXPECT_THAT(Scrape("Authorization: Bearer first\r\n"), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Scrape("Authorization: Bearer second\r\n"), StartsWith("HTTP/1.1 200"));
}

TEST_F(MetricsTokenTest, StaysInUseWhenItsFileIsGone) {
  ASSERT_TRUE(Start().ok());
  std::remove(file_.c_str());
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(Scrape("Authorization: Bearer first\r\n"), StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(Scrape("Authorization: Bearer \r\n"), StartsWith("HTTP/1.1 401"));
    EXPECT_THAT(Scrape(""), StartsWith("HTTP/1.1 401"));
  }
  EXPECT_EQ(metrics_.metrics_token_reload_failures.Value(), 1);
}

TEST_F(MetricsTokenTest, ThatIsMissingAtStartIsAClearError) {
  for (const char* content : {"", "\n", "  \nsecond line"}) {
    WriteFile(content);
    const absl::Status status = Start();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(file_));
  }
}

TEST(MetricsServerTest, SaysWhetherItIsReady) {
  Metrics metrics(ExampleOptions());
  std::atomic<bool> ready{false};
  auto server = MetricsServer::Start({"127.0.0.1:0", "", [&] { return ready.load(); }}, &metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* path : {"/healthz", "/readyz", "/metrics", "/other"}) {
    const std::string get = HttpGet((*server)->port(), path);
    const std::string head = HttpExchange(
        (*server)->port(), absl::StrCat("HEAD ", path, " HTTP/1.1\r\nHost: h\r\n\r\n"));
    EXPECT_EQ(head.substr(0, head.find('\n')), get.substr(0, get.find('\n'))) << path;
    EXPECT_EQ(HttpBody(head), "") << path;
  }
  EXPECT_THAT(HttpGet((*server)->port(), "/readyz"), StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(HttpGet((*server)->port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  ready = true;
  EXPECT_THAT(HttpGet((*server)->port(), "/readyz"), StartsWith("HTTP/1.1 200"));
}

TEST(MetricsServerTest, OtherPathsAreNotFound) {
  Metrics metrics(ExampleOptions());
  auto server = MetricsServer::Start({"127.0.0.1:0"}, &metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics"), StartsWith("HTTP/1.1 200"));
  for (const char* path :
       {"/", "/metric", "/metrics2", "/metrics/x", "/a/metrics", "/etc/passwd"}) {
    EXPECT_THAT(HttpGet((*server)->port(), path), StartsWith("HTTP/1.1 404")) << path;
  }
}

TEST(MetricsServerTest, PortInUseIsAClearError) {
  Metrics metrics(ExampleOptions());
  auto first = MetricsServer::Start({"127.0.0.1:0"}, &metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = MetricsServer::Start({(*first)->address()}, &metrics);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.status().message(), absl::StrCat("cannot serve metrics on ", (*first)->address(),
                                                    ": Address already in use"));
  first->reset();
  EXPECT_TRUE(MetricsServer::Start({second.ok() ? "" : "127.0.0.1:0"}, &metrics).ok());
}

TEST(MetricsServerTest, ServesProbesAlone) {
  auto server = MetricsServer::Start({"127.0.0.1:0"}, /*metrics=*/nullptr);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(HttpGet((*server)->port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet((*server)->port(), "/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics"), StartsWith("HTTP/1.1 404"));
}

TEST(MetricsServerTest, AddressOfAnotherMachine) {
  Metrics metrics(ExampleOptions());
  auto server = MetricsServer::Start({"192.0.2.1:0"}, &metrics);  // reserved for documentation
  EXPECT_EQ(server.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("Cannot assign requested address"));
}

TEST(MetricsServerTest, MalformedAddresses) {
  Metrics metrics(ExampleOptions());
  for (const char* address : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1",
                              "127.0.0.1:65536", "::1:80", "[::1:80", "1:2,3:4", "127.0.0.1:80s"}) {
    auto server = MetricsServer::Start({address}, &metrics);
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(server.status().message()),
                HasSubstr(absl::StrCat("\"", address, "\"")));
  }
}

TEST(MetricsServerTest, AllInterfacesAndNames) {
  Metrics metrics(ExampleOptions());
  for (const char* address : {":0", "0.0.0.0:0", "localhost:0"}) {
    auto server = MetricsServer::Start({address}, &metrics);
    ASSERT_TRUE(server.ok()) << address << ": " << server.status();
    EXPECT_GT((*server)->port(), 0) << address;
  }
}

}  // namespace
}  // namespace flashcore::server
