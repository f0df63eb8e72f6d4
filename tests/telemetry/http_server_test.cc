#include "server/telemetry/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/base/fake_clock.h"
#include "tests/telemetry/http_get.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class HttpServerTest : public ::testing::Test {
 protected:
  void Start(HttpServer::Options options) {
    options.clock = &clock_;
    auto sockets = ListenTcp("127.0.0.1", 0);
    ASSERT_TRUE(sockets.ok()) << sockets.status();
    port_ = PortOf(LocalAddress(sockets->front().get()));
    if (!options.answer) {
      options.answer = [this](const HttpRequest&) { return HttpReply{200, body_}; };
    }
    server_ = std::make_unique<HttpServer>(std::move(options), *std::move(sockets));
  }
  std::string Get() const { return HttpGet(port_, "/"); }
  // Without the one line that differs between two equal replies.
  static std::string WithoutDate(const std::string& response) {
    return absl::StrReplaceAll(response, {{HttpHeader(response, "Date"), ""}});
  }

  testing::FakeClock clock_;
  std::string body_ = "ok\n";
  int port_ = 0;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersInAnyPieces) {
  Start({});
  const SilentConnection old(port_, "GET / HTTP/1.0\n\n");
  EXPECT_TRUE(old.WaitUntilEnded());
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(HttpBody(Get()), "ok\n");
}

TEST_F(HttpServerTest, TakesWhatClientsSend) {
  HttpServer::Options options;
  options.answer = [](const HttpRequest& request) {
    return HttpReply{200, absl::StrCat(request.path, " ", request.authorization)};
  };
  Start(std::move(options));
  for (const char* target :
       {"/metrics", "/metrics?x=/y", "/metrics?", "/%6Detrics", "http://localhost:9464/metrics",
        "HTTP://[::1]/metrics?x", "https://h/metrics"}) {
    EXPECT_EQ(HttpBody(HttpGet(port_, target, "AUTHORIZATION:  Bearer x\r\n")),
              "/metrics Bearer x");
    EXPECT_EQ(HttpBody(HttpGet(port_, target)), "/metrics ");
  }
}

TEST_F(HttpServerTest, RefusesWhatItDoesNotKnow) {
  Start({});
  EXPECT_THAT(HttpGet(port_, "/", std::string(20'000, 'x')), StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(HttpGet(port_, "/", "no colon\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(HttpExchange(port_, "GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(HttpExchange(port_, "GET / HTTP/7.3\r\nHost: h\r\n\r\n"), StartsWith("HTTP/1.1 505"));
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "BREW"}) {
    const std::string reply =
        HttpExchange(port_, absl::StrCat(method, " / HTTP/1.1\r\nHost: h\r\n\r\n"));
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 405 Method Not Allowed\r\n")) << method;
    EXPECT_THAT(reply, HasSubstr("\r\nAllow: GET, HEAD\r\n")) << method;
  }
}

TEST_F(HttpServerTest, RefusesAMethodWhateverItsBody) {
  Start({});
  for (const char* more :
       {"Content-Length: 5\r\n\r\nhello", "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"}) {
    EXPECT_THAT(HttpExchange(port_, absl::StrCat("POST / HTTP/1.1\r\nHost: h\r\n", more)),
                StartsWith("HTTP/1.1 405"))
        << more;
  }
}

// RFC 9110, 9.3.2: the header of the reply to GET, and no body.
TEST_F(HttpServerTest, AnswersHeadAsGetWithoutTheBody) {
  HttpServer::Options options;
  options.answer = [](const HttpRequest& request) {
    if (request.path == "/") return HttpReply{200, std::string(100'000, 'x')};
    HttpReply refused = {401, "no\n"};
    refused.challenge = "Bearer realm=\"r\"";
    return refused;
  };
  Start(std::move(options));
  for (const char* path : {"/", "/refused"}) {
    const std::string got = HttpGet(port_, path);
    const std::string head = HttpExchange(
        port_, absl::StrCat("HEAD ", path, " HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
    EXPECT_EQ(HttpBody(head), "");
    EXPECT_EQ(HttpHeader(head, "Content-Length"), absl::StrCat(HttpBody(got).size()));
    EXPECT_EQ(WithoutDate(head), WithoutDate(got.substr(0, head.size())));
  }
}

TEST_F(HttpServerTest, SaysWhatRepliesAre) {
  HttpServer::Options options;
  options.answer = [](const HttpRequest& request) {
    return request.path == "/" ? HttpReply{200, "ok\n"} : HttpReply{200, "1", "text/x"};
  };
  Start(std::move(options));
  const std::string reply = Get();
  EXPECT_EQ(HttpHeader(reply, "Content-Type"), "text/plain; charset=utf-8");
  EXPECT_EQ(HttpHeader(reply, "Content-Length"), "3");
  EXPECT_EQ(HttpHeader(reply, "Cache-Control"), "no-store");
  EXPECT_EQ(HttpHeader(reply, "Connection"), "close");
  EXPECT_NE(HttpHeader(reply, "Date"), "");
  EXPECT_EQ(HttpHeader(reply, "WWW-Authenticate"), "");
  EXPECT_EQ(HttpHeader(HttpGet(port_, "/x"), "Content-Type"), "text/x");
}

TEST_F(HttpServerTest, AnswersOneRequest) {
  Start({});
  const std::string request = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
  EXPECT_EQ(HttpBody(HttpExchange(port_, request + request)), "ok\n");
}

// Six every 2.5 s were enough for a server with a thread for each connection.
TEST_F(HttpServerTest, HalfRequestsDelayNobody) {
  HttpServer::Options options;
  options.max_connections = 20;
  Start(std::move(options));
  std::deque<SilentConnection> half;
  for (int i = 0; i < 100; ++i) half.emplace_back(port_, "GET / HTTP/1.1\r\nHost: l");
  for (int i = 0; i < 10; ++i) EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(half.front().WaitUntilEnded());  // it made room
  EXPECT_FALSE(half.back().ended());
}

TEST_F(HttpServerTest, EndsAHalfRequestInTime) {
  const Nanoseconds time_limit = HttpServer::Options().time_limit;
  Start({});
  const SilentConnection half(port_, "GET /");
  const SilentConnection empty(port_, "");
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200"));  // those before it are accepted
  clock_.Advance(time_limit - Nanoseconds(1));
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200"));  // the server has looked at the time
  EXPECT_FALSE(half.ended());
  EXPECT_FALSE(empty.ended());
  clock_.Advance(Nanoseconds(1));
  EXPECT_TRUE(half.WaitUntilEnded());
  EXPECT_TRUE(empty.WaitUntilEnded());
}

// It waits neither for clients nor for the time limit.
TEST_F(HttpServerTest, StopsWhileConnectionsAreOpen) {
  Start({});
  const SilentConnection half(port_, "GET /");
  EXPECT_THAT(Get(), StartsWith("HTTP/1.1 200"));  // the one before it is accepted
  server_.reset();
  EXPECT_TRUE(half.ended());
}

TEST_F(HttpServerTest, UnreadRepliesDelayNobody) {
  body_ = std::string(16 << 20, 'x');  // more than the sockets hold
  Start({});
  std::deque<SilentConnection> unread;
  for (int i = 0; i < 4; ++i) unread.emplace_back(port_, "GET / HTTP/1.1\r\nHost: h\r\n\r\n");
  EXPECT_EQ(HttpBody(Get()).size(), body_.size());
}

TEST_F(HttpServerTest, AClientThatSendsOnIsCutOff) {
  Start({});
  const SilentConnection endless(port_,
                                 "GET / HTTP/1.1\r\nHost: h\r\n\r\n" + std::string(1 << 20, 'x'));
  EXPECT_TRUE(endless.WaitUntilEnded());
  EXPECT_THAT(Get(), HasSubstr("ok"));
}

}  // namespace
}  // namespace flashcore::server
