#include "flashcore/client.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/client/request_fixture.h"
#include "tests/client/unused_port.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

ClientOptions QuickRetries(int max_attempts) {
  ClientOptions options;
  options.timeout = absl::Minutes(1);
  options.retry.max_attempts = max_attempts;
  options.retry.initial_backoff = absl::Milliseconds(1);
  options.retry.max_backoff = absl::Milliseconds(4);
  return options;
}

std::unique_ptr<Client> ClientOf(const FakeServer& server, int max_attempts = 1) {
  return *Client::Create(server.target(), QuickRetries(max_attempts));
}

auto FailWith(grpc::StatusCode code, const std::string& message) {
  return [code, message](grpc::ServerContext*, const v1::AttendRequest&, v1::AttendResponse*) {
    return grpc::Status(code, message);
  };
}

TEST(ClientTest, AttendSendsTheRequestAndFillsTheCallersMemory) {
  FakeServer server;
  RequestFixture r("name");
  r.request.dtype = DType::kBFloat16;
  r.request.layout = Layout::kHND;
  r.request.mask = Mask::SlidingWindow(7, std::nullopt);
  r.request.softmax_scale = 0.25f;
  r.request.precision = Precision::kInt8Qk;
  AttendResult result;
  ASSERT_EQ(ClientOf(server)->Attend(r.request, &result), absl::OkStatus());
  EXPECT_EQ(r.output, r.query);
  EXPECT_EQ(r.lse_values.back(), static_cast<float>(r.lse_values.size() - 1));
  EXPECT_EQ(result.request_id, "name");
  EXPECT_EQ(result.timing.kernel_ns, 1000u);
  EXPECT_EQ(result.attempts, 1);

  const v1::AttendRequest got = server.last_request();
  EXPECT_EQ(result.request_bytes, got.ByteSizeLong());
  EXPECT_EQ(got.request_id(), "name");
  ASSERT_EQ(got.spans_size(), 2);
  EXPECT_EQ(got.spans(0).query_rows(), 3u);
  EXPECT_EQ(got.spans(0).kv_rows(), 4u);
  EXPECT_EQ(got.dtype(), v1::DTYPE_BFLOAT16);
  EXPECT_EQ(got.layout(), v1::LAYOUT_HND);
  EXPECT_EQ(got.mask().kind(), v1::Mask::KIND_SLIDING_WINDOW);
  EXPECT_EQ(got.mask().window_left(), 7);
  EXPECT_FALSE(got.mask().has_window_right());
  EXPECT_EQ(got.softmax_scale(), 0.25f);
  EXPECT_EQ(got.precision(), v1::PRECISION_INT8_QK);
  EXPECT_TRUE(got.return_lse());
  EXPECT_EQ(got.query().size(), r.query.size());
  EXPECT_EQ(got.key(), std::string(r.key.size(), '\1'));
  EXPECT_EQ(got.value(), std::string(r.value.size(), '\2'));
}

TEST(ClientTest, WorksOverAUnixSocket) {
  FakeServer server(absl::StrCat("unix:", testing::TempDir(), "/client_test.", getpid()));
  RequestFixture r;
  EXPECT_EQ(ClientOf(server)->Attend(r.request, nullptr), absl::OkStatus());
  EXPECT_EQ(r.output, r.query);
}

TEST(ClientTest, RejectsMemoryThatDoesNotFitBeforeSending) {
  FakeServer server;
  const auto client = ClientOf(server);
  const auto expect_rejected = [&](auto change, const char* field) {
    RequestFixture r;
    change(&r.request);
    const absl::Status status = client->Attend(r.request, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(status.message(), HasSubstr(field));
  };
  expect_rejected([](AttendRequest* r) { r->output = r->output.subspan(1); }, "output");
  expect_rejected([](AttendRequest* r) { r->lse = r->lse.subspan(1); }, "lse");
  expect_rejected([](AttendRequest* r) { r->query = r->query.subspan(1); }, "query");
  expect_rejected([](AttendRequest* r) { r->key = {}; }, "key");
  expect_rejected([](AttendRequest* r) { r->value = r->value.subspan(1); }, "value");
  expect_rejected([](AttendRequest* r) { r->spans.clear(); }, "spans");
  expect_rejected([](AttendRequest* r) { r->spans[1].query_rows = 0; }, "query_rows");
  expect_rejected([](AttendRequest* r) { r->num_kv_heads = 3; }, "num_kv_heads");
  expect_rejected([](AttendRequest* r) { r->head_dim = 0; }, "head_dim");
  expect_rejected(
      [](AttendRequest* r) {
        // 2^32 rows * 2^31 heads * 2^31 elements: the product wraps around in 64 bits.
        r->num_heads = r->num_kv_heads = r->head_dim = 1u << 31;
        r->spans.assign(2, {1u << 31, 0});
      },
      "spans");
  EXPECT_EQ(server.attend_calls(), 0);
}

TEST(ClientTest, RejectsAMessageOverItsOwnLimit) {
  FakeServer server;
  ClientOptions options;
  options.max_message_bytes = 100;
  RequestFixture r;
  EXPECT_EQ((*Client::Create(server.target(), options))->Attend(r.request, nullptr).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server.attend_calls(), 0);
}

TEST(ClientTest, RejectsAMessageOverTheServersLimitOnceItIsKnown) {
  FakeServer server;
  server.info.mutable_limits()->set_max_message_bytes(100);
  const auto client = ClientOf(server);
  RequestFixture r;
  EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
  ASSERT_TRUE(client->GetServerInfo().ok());
  const absl::Status status = client->Attend(r.request, nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  for (const char* part : {"at most 100 bytes", "--max_message_bytes", "Sequence::Append"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
  EXPECT_EQ(server.attend_calls(), 1);
}

TEST(ClientTest, ExplainsTheMessageLimitOfGrpc) {
  FakeServer server;
  server.on_attend = [](grpc::ServerContext*, const v1::AttendRequest&, v1::AttendResponse*) {
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                        "Received message larger than max (5 vs. 4)");
  };
  RequestFixture r;
  const absl::Status status = ClientOf(server)->Attend(r.request, nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  for (const char* part : {"(5 vs. 4)", "--max_message_bytes", "Sequence::Append"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
}

TEST(ClientTest, RepliesOfWrongSizeAreErrorsAndWriteNothing) {
  FakeServer server;
  int output_change = 0, lse_change = 0;
  server.on_attend = [&](grpc::ServerContext*, const v1::AttendRequest& request,
                         v1::AttendResponse* response) {
    FakeServer::AnswerRightly(request, response);
    response->mutable_output()->resize(response->output().size() + output_change);
    response->mutable_lse()->resize(response->lse().size() + lse_change);
    return grpc::Status::OK;
  };
  const auto client = ClientOf(server);
  for (const auto& [output, lse] : {std::pair(1, 0), {-1, 0}, {0, 4}, {0, -4}}) {
    output_change = output;
    lse_change = lse;
    RequestFixture r;
    const absl::Status status = client->Attend(r.request, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("reply: output has"));
    EXPECT_EQ(r.output, std::vector<std::byte>(r.output.size()));
  }
}

TEST(ClientTest, StatusKeepsCodeAndMessage) {
  FakeServer server;
  const auto client = ClientOf(server);
  for (int code = 1; code <= 16; ++code) {
    server.on_attend = FailWith(static_cast<grpc::StatusCode>(code), "the message");
    RequestFixture r;
    const absl::Status status = client->Attend(r.request, nullptr);
    EXPECT_EQ(static_cast<int>(status.code()), code);
    EXPECT_EQ(status.message(), "the message");
  }
}

TEST(ClientTest, UnavailableIsRetriedAsOftenAsThePolicySays) {
  FakeServer server;
  std::atomic<int> failures{2};
  server.on_attend = [&](grpc::ServerContext*, const v1::AttendRequest& request,
                         v1::AttendResponse* response) {
    if (failures.fetch_sub(1) > 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    FakeServer::AnswerRightly(request, response);
    return grpc::Status::OK;
  };
  RequestFixture r;
  AttendResult result;
  EXPECT_EQ(ClientOf(server, 4)->Attend(r.request, &result), absl::OkStatus());
  EXPECT_EQ(result.attempts, 3);
  failures = 100;
  EXPECT_EQ(ClientOf(server, 4)->Attend(r.request, &result).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(result.attempts, 4);
  EXPECT_EQ(server.attend_calls(), 7);
}

TEST(ClientTest, OtherErrorsAreNotRetried) {
  FakeServer server;
  server.on_attend = FailWith(grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full");
  RequestFixture r;
  EXPECT_TRUE(absl::IsResourceExhausted(ClientOf(server, 4)->Attend(r.request, nullptr)));
  EXPECT_EQ(server.attend_calls(), 1);
}

TEST(ClientTest, ASequenceIsRetriedOnlyWithItsExpectedLength) {
  FakeServer server;
  server.on_attend = FailWith(grpc::StatusCode::UNAVAILABLE, "draining");
  RequestFixture r;
  r.request.spans[0].sequence_id = "0123456789abcdef";
  const auto client = ClientOf(server, 3);
  EXPECT_TRUE(absl::IsUnavailable(client->Attend(r.request, nullptr)));
  EXPECT_EQ(server.attend_calls(), 1);
  r.request.spans[0].expected_length = 0;
  EXPECT_TRUE(absl::IsUnavailable(client->Attend(r.request, nullptr)));
  EXPECT_EQ(server.attend_calls(), 4);
}

TEST(ClientTest, DeadlineEndsACall) {
  FakeServer server;
  server.on_attend = [](grpc::ServerContext* context, const v1::AttendRequest&,
                        v1::AttendResponse*) {
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return grpc::Status::CANCELLED;
  };
  RequestFixture r;
  const auto client = ClientOf(server);
  ASSERT_TRUE(client->WaitForConnected(absl::Now() + absl::Minutes(1)));
  CallOptions call;
  call.deadline = absl::Now() + absl::Milliseconds(50);
  const absl::Status status = client->Attend(r.request, nullptr, call);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(
      std::string(status.message()),
      ::testing::MatchesRegex("the server did not answer before the deadline, .*s after the "
                              "call began; it may have taken effect, or still may"));
}

// A deadline that the server finds passed has no unknown outcome.
TEST(ClientTest, ADeadlineOfTheServerKeepsItsMessage) {
  FakeServer server;
  server.on_attend = [](grpc::ServerContext*, const v1::AttendRequest&, v1::AttendResponse*) {
    return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "while it was queued");
  };
  RequestFixture r;
  const absl::Status status = ClientOf(server)->Attend(r.request, nullptr);
  EXPECT_EQ(status, absl::DeadlineExceededError("while it was queued"));
}

TEST(ClientTest, AnUnreachableServerIsUnavailable) {
  const UnusedPort port;
  RequestFixture r;
  AttendResult result;
  const auto client = *Client::Create(port.target(), QuickRetries(3));
  EXPECT_TRUE(absl::IsUnavailable(client->Attend(r.request, &result)));
  EXPECT_EQ(result.attempts, 3);
  EXPECT_FALSE(client->WaitForConnected(absl::Now() + absl::Milliseconds(20)));
}

// gRPC takes a time before 1970 for none, and the clock's range ends in 2262.
TEST(ClientTest, TimeoutsOfAnySizeMeanWhatTheySay) {
  FakeServer server;
  RequestFixture r;
  const absl::Duration huge[] = {absl::InfiniteDuration(), absl::Hours(24) * 365 * 200,
                                 absl::Seconds(int64_t{9'000'000'000}), absl::Seconds(1e300),
                                 absl::InfiniteDuration() / 2};
  for (const absl::Duration timeout : huge) {
    ClientOptions options;
    options.timeout = timeout;
    const auto client = *Client::Create(server.target(), options);
    EXPECT_EQ(client->GetServerInfo().status(), absl::OkStatus()) << timeout;
    EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus()) << timeout;
    EXPECT_EQ(client->Attend(r.request, nullptr, {absl::Now() + timeout, ""}), absl::OkStatus());
    absl::Notification done;
    client->AttendAsync(r.request, [&](const absl::Status& status, const AttendResult&) {
      EXPECT_EQ(status, absl::OkStatus()) << timeout;
      done.Notify();
    });
    done.WaitForNotification();
  }
  const auto client = ClientOf(server);
  for (const absl::Time past :
       {absl::InfinitePast(), absl::UnixEpoch() - absl::Hours(1), absl::UnixEpoch()}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(client->GetServerInfo({past, ""}).status())) << past;
    EXPECT_TRUE(absl::IsDeadlineExceeded(client->Attend(r.request, nullptr, {past, ""}))) << past;
  }
  for (const absl::Duration timeout : {absl::ZeroDuration(), -absl::InfiniteDuration()}) {
    ClientOptions options;
    options.timeout = timeout;
    const auto refused = Client::Create(server.target(), options);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.status().message()),
                HasSubstr(absl::StrCat("timeout: ", absl::FormatDuration(timeout), "; want")));
  }
}

TEST(ClientTest, AsyncCallsBackOnceWithRetriesAndOutlivesItsClient) {
  FakeServer server;
  std::atomic<int> failures{2};
  server.on_attend = [&](grpc::ServerContext*, const v1::AttendRequest& request,
                         v1::AttendResponse* response) {
    if (failures.fetch_sub(1) > 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    FakeServer::AnswerRightly(request, response);
    return grpc::Status::OK;
  };
  RequestFixture r;
  absl::Notification done;
  absl::Status status;
  AttendResult result;
  ClientOf(server, 4)->AttendAsync(r.request, [&](absl::Status s, AttendResult answer) {
    status = std::move(s);
    result = std::move(answer);
    done.Notify();  // aborts if it is called twice
  });
  done.WaitForNotification();
  EXPECT_EQ(status, absl::OkStatus());
  EXPECT_EQ(result.attempts, 3);
  EXPECT_EQ(r.output, r.query);
}

TEST(ClientTest, AsyncRejectsABadRequestInItsCallback) {
  FakeServer server;
  RequestFixture r;
  r.request.output = {};
  absl::Status status;
  ClientOf(server)->AttendAsync(r.request, [&](absl::Status s, AttendResult) { status = s; });
  EXPECT_TRUE(absl::IsInvalidArgument(status));
}

TEST(ClientTest, CancelEndsACallInFlight) {
  FakeServer server;
  absl::Notification arrived;
  server.on_attend = [&](grpc::ServerContext* context, const v1::AttendRequest&,
                         v1::AttendResponse*) {
    arrived.Notify();
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return grpc::Status::CANCELLED;
  };
  RequestFixture r;
  absl::Notification done;
  absl::Status status;
  const auto client = ClientOf(server);
  CallHandle handle = client->AttendAsync(r.request, [&](absl::Status s, AttendResult) {
    status = std::move(s);
    done.Notify();
  });
  arrived.WaitForNotification();
  handle.Cancel();
  done.WaitForNotification();
  EXPECT_TRUE(absl::IsCancelled(status));
  handle.Cancel();  // does nothing
}

TEST(ClientTest, CancelEndsTheWaitForARetry) {
  FakeServer server;
  server.on_attend = FailWith(grpc::StatusCode::UNAVAILABLE, "draining");
  ClientOptions options;
  options.timeout = absl::Hours(2);
  options.retry.initial_backoff = options.retry.max_backoff = absl::Hours(1);
  const auto client = *Client::Create(server.target(), options);
  RequestFixture r;
  absl::Notification done;
  absl::Status status;
  CallHandle handle = client->AttendAsync(r.request, [&](absl::Status s, AttendResult) {
    status = std::move(s);
    done.Notify();
  });
  while (server.attend_calls() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  handle.Cancel();
  done.WaitForNotification();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;  // in the attempt, before the wait or in it
  EXPECT_EQ(server.attend_calls(), 1);
}

TEST(ClientTest, InfoAndHealth) {
  FakeServer server;
  const auto client = ClientOf(server);
  EXPECT_EQ(client->GetServerInfo()->version(), "fake");
  EXPECT_EQ(*client->CheckHealth(), HealthStatus::kServing);
  EXPECT_TRUE(absl::IsNotFound(client->CheckHealth("no.such.Service").status()));
}

TEST(ClientTest, TargetsAreChecked) {
  for (const char* good : {"localhost:1", "127.0.0.1:65535", "[::1]:80", "unix:/tmp/x", "unix:x",
                           "dns:///host:1", "ipv4:127.0.0.1:1"}) {
    EXPECT_TRUE(Client::Create(good).ok()) << good;
  }
  for (const char* bad : {"", "localhost", ":80", "host:", "host:0", "host:65536", "host:x",
                          "::1:80", "unix:", "http://host:80", "a b:1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Client::Create(bad).status())) << bad;
  }
}

}  // namespace
}  // namespace flashcore
