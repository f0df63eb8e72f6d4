#include "flashcore/attend_stream.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/client/request_fixture.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

// Reads `count` requests, or as many as come.
std::vector<v1::AttendRequest> ReadRequests(FakeServer::Stream* stream, size_t count) {
  std::vector<v1::AttendRequest> requests;
  v1::AttendRequest request;
  while (requests.size() < count && stream->Read(&request)) requests.push_back(request);
  return requests;
}

void Answer(FakeServer::Stream* stream, const v1::AttendRequest& request) {
  v1::AttendResponse response;
  FakeServer::AnswerRightly(request, &response);
  stream->Write(response);
}

// `count` requests on one stream, and how often and with what each was called back.
class Requests {
 public:
  Requests(AttendStream* stream, int count) {
    for (int i = 0; i < count; ++i) {
      fixtures_.push_back(std::make_unique<RequestFixture>(absl::StrCat("r", i)));
      fixtures_.back()->query[0] = static_cast<std::byte>(i);
      calls_.push_back(0);
      statuses_.emplace_back(absl::UnknownError("not called"));
      send_statuses_.push_back(
          stream->Send(fixtures_[i]->request, [this, i](absl::Status status, AttendResult result) {
            absl::MutexLock lock(&mutex_);
            ++calls_[i];
            statuses_[i] = std::move(status);
            EXPECT_EQ(result.request_id, absl::StrCat("r", i));
            EXPECT_GT(result.request_bytes, fixtures_[i]->query.size());
            if (statuses_[i].ok()) {
              EXPECT_GT(result.response_bytes, fixtures_[i]->output.size());
            }
          }));
    }
  }

  void ExpectEachOnce(absl::StatusCode code) {
    absl::MutexLock lock(&mutex_);
    for (size_t i = 0; i < calls_.size(); ++i) {
      EXPECT_EQ(send_statuses_[i], absl::OkStatus());
      EXPECT_EQ(calls_[i], 1) << i;
      EXPECT_EQ(statuses_[i].code(), code) << i << " " << statuses_[i];
      if (code == absl::StatusCode::kOk) {
        EXPECT_EQ(fixtures_[i]->output, fixtures_[i]->query) << i;
      }
    }
  }

  const absl::Status& status(int i) const { return statuses_[i]; }

 private:
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<RequestFixture>> fixtures_;
  std::vector<absl::Status> send_statuses_;
  std::vector<int> calls_;
  std::vector<absl::Status> statuses_;
};

class AttendStreamTest : public testing::Test {
 protected:
  std::unique_ptr<AttendStream> Open(StreamOptions options = {}) {
    return client_->OpenStream(options);
  }

  FakeServer server_;
  std::unique_ptr<Client> client_ = *Client::Create(server_.target());
};

TEST_F(AttendStreamTest, TimeoutsOfAnySizeMeanWhatTheySay) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    for (const v1::AttendRequest& request : ReadRequests(stream, 1)) Answer(stream, request);
    return grpc::Status::OK;
  };
  for (const absl::Duration timeout :
       {absl::InfiniteDuration(), absl::Seconds(1e300), absl::Hours(24) * 365 * 400}) {
    StreamOptions options;
    options.timeout = timeout;
    options.deadline = absl::Now() + timeout;
    const auto stream = Open(options);
    Requests requests(stream.get(), 1);
    EXPECT_EQ(stream->Finish(), absl::OkStatus());
    requests.ExpectEachOnce(absl::StatusCode::kOk);
  }
  for (const absl::Duration timeout : {absl::ZeroDuration(), -absl::Seconds(1)}) {
    StreamOptions options;
    options.timeout = timeout;
    const RequestFixture r("r");
    const absl::Status status = Open(options)->Send(r.request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("timeout: "));
  }
}

TEST_F(AttendStreamTest, AnswersOutOfOrderReachTheirRequests) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    const auto requests = ReadRequests(stream, 20);
    for (auto it = requests.rbegin(); it != requests.rend(); ++it) Answer(stream, *it);
    ReadRequests(stream, 1);  // until the client half-closes
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 20);
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  requests.ExpectEachOnce(absl::StatusCode::kOk);
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  RequestFixture late;
  EXPECT_FALSE(stream->Send(late.request).ok());
}

TEST_F(AttendStreamTest, ARequestNeedsAnId) {
  const RequestFixture r("");
  const absl::Status status = Open()->Send(r.request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("request_id: empty"));
}

TEST_F(AttendStreamTest, AStatusCodeThatIsNoneIsUnknown) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    for (const int code : {63, -1}) {
      v1::AttendResponse response;
      response.set_request_id(ReadRequests(stream, 1)[0].request_id());
      response.mutable_status()->set_code(code);
      response.mutable_status()->set_message("odd");
      stream->Write(response);
    }
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 2);
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  EXPECT_EQ(requests.status(0), absl::UnknownError("odd"));
  EXPECT_EQ(requests.status(1), absl::UnknownError("odd"));
}

TEST_F(AttendStreamTest, ReceiveReturnsEachAnswer) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    const auto requests = ReadRequests(stream, 2);
    Answer(stream, requests[1]);
    v1::AttendResponse refused;
    refused.set_request_id(requests[0].request_id());
    refused.mutable_status()->set_code(8);
    refused.mutable_status()->set_message("queue full");
    stream->Write(refused);
    ReadRequests(stream, 1);
    return grpc::Status::OK;
  };
  auto stream = Open();
  RequestFixture a("a"), b("b");
  ASSERT_EQ(stream->Send(a.request), absl::OkStatus());
  ASSERT_EQ(stream->Send(b.request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.result.request_id, "b");
  EXPECT_EQ(answer.status, absl::OkStatus());
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.result.request_id, "a");
  EXPECT_EQ(answer.status, absl::ResourceExhaustedError("queue full"));
  EXPECT_FALSE(stream->Receive(&answer));
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

TEST_F(AttendStreamTest, ABrokenStreamGivesEveryRequestItsStatusOnce) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    const auto requests = ReadRequests(stream, 10);
    Answer(stream, requests[3]);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "going away");
  };
  auto stream = Open();
  Requests requests(stream.get(), 10);
  EXPECT_EQ(stream->Finish(), absl::UnavailableError("going away"));
  EXPECT_EQ(requests.status(3), absl::OkStatus());
  for (int i = 0; i < 10; ++i) {
    if (i == 3) continue;
    EXPECT_EQ(requests.status(i), absl::UnavailableError("going away")) << i;
  }
  RequestFixture late;
  EXPECT_EQ(stream->Send(late.request), absl::UnavailableError("going away"));
}

TEST_F(AttendStreamTest, EndingWithoutAnswersIsAnError) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    ReadRequests(stream, 3);
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 3);
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kInternal);
  requests.ExpectEachOnce(absl::StatusCode::kInternal);
}

TEST_F(AttendStreamTest, AnAnswerToNobodyEndsTheStream) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    auto requests = ReadRequests(stream, 2);
    requests[0].set_request_id("stranger");
    Answer(stream, requests[0]);
    ReadRequests(stream, 1);
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 2);
  EXPECT_THAT(stream->Finish().message(), HasSubstr("no request with request_id 'stranger'"));
  requests.ExpectEachOnce(absl::StatusCode::kInternal);
}

TEST_F(AttendStreamTest, AWrongSizeFailsItsRequestOnly) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    auto requests = ReadRequests(stream, 2);
    requests[0].mutable_query()->pop_back();
    for (const auto& request : requests) Answer(stream, request);
    ReadRequests(stream, 1);
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 2);
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  EXPECT_EQ(requests.status(0).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(requests.status(1), absl::OkStatus());
}

TEST_F(AttendStreamTest, AWrongSequenceLengthFailsItsRequestOnly) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    for (const auto& request : ReadRequests(stream, 2)) {
      v1::AttendResponse response;
      FakeServer::AnswerRightly(request, &response);
      if (request.request_id() == "resident") response.add_sequence_lengths(15);
      stream->Write(response);
    }
    ReadRequests(stream, 1);
    return grpc::Status::OK;
  };
  auto stream = Open();
  RequestFixture resident("resident"), other("other");
  resident.request.spans = {{5, 4, "0123456789abcdef", 10}};  // 14 after the append
  ASSERT_EQ(stream->Send(resident.request), absl::OkStatus());
  ASSERT_EQ(stream->Send(other.request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_TRUE(absl::IsInternal(answer.status)) << answer.status;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

TEST_F(AttendStreamTest, SendRefusesWhatItCannotTake) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    ReadRequests(stream, 100);
    return grpc::Status(grpc::StatusCode::ABORTED, "end");
  };
  StreamOptions options;
  options.max_inflight = 2;
  auto stream = Open(options);
  RequestFixture nameless(""), misfit("misfit"), a("a"), twin("a"), b("b"), c("c");
  misfit.request.output = {};
  EXPECT_TRUE(absl::IsInvalidArgument(stream->Send(nameless.request)));
  EXPECT_TRUE(absl::IsInvalidArgument(stream->Send(misfit.request)));
  EXPECT_EQ(stream->Send(a.request), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(stream->Send(twin.request)));
  EXPECT_EQ(stream->Send(b.request), absl::OkStatus());
  EXPECT_TRUE(absl::IsResourceExhausted(stream->Send(c.request)));
  EXPECT_TRUE(absl::IsAborted(stream->Finish()));
}

TEST_F(AttendStreamTest, EveryRequestCarriesTheTimeout) {
  std::vector<uint64_t> timeouts;
  server_.on_stream = [&](FakeServer::Stream* stream) {
    for (const v1::AttendRequest& request : ReadRequests(stream, 2)) {
      timeouts.push_back(request.timeout_ns());
      Answer(stream, request);
    }
    return grpc::Status::OK;
  };
  StreamOptions options;
  for (const auto& [timeout, want] : {std::pair(absl::InfiniteDuration(), uint64_t{0}),
                                      {absl::Milliseconds(5), uint64_t{5'000'000}}}) {
    timeouts.clear();
    options.timeout = timeout;
    auto stream = Open(options);
    Requests requests(stream.get(), 2);
    EXPECT_EQ(stream->Finish(), absl::OkStatus());
    requests.ExpectEachOnce(absl::StatusCode::kOk);
    EXPECT_THAT(timeouts, testing::ElementsAre(want, want));
  }
}

TEST_F(AttendStreamTest, AMessageOverTheServersLimitIsNotWritten) {
  server_.info.mutable_limits()->set_max_message_bytes(100);
  server_.on_stream = [](FakeServer::Stream* stream) {
    EXPECT_TRUE(ReadRequests(stream, 1).empty());
    return grpc::Status::OK;
  };
  ASSERT_TRUE(client_->GetServerInfo().ok());
  auto stream = Open();
  RequestFixture large("large");
  EXPECT_TRUE(absl::IsResourceExhausted(stream->Send(large.request)));
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

TEST_F(AttendStreamTest, DestructionCancelsAndWaits) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    ReadRequests(stream, 100);
    return grpc::Status::OK;
  };
  auto stream = Open();
  Requests requests(stream.get(), 5);
  stream.reset();
  requests.ExpectEachOnce(absl::StatusCode::kCancelled);
}

TEST_F(AttendStreamTest, AnUnusedStreamCanBeFinishedOrDropped) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    ReadRequests(stream, 1);
    return grpc::Status::OK;
  };
  EXPECT_EQ(Open()->Finish(), absl::OkStatus());
  Open().reset();
}

TEST_F(AttendStreamTest, ManyThreadsAndSendsFromCallbacks) {
  server_.on_stream = [](FakeServer::Stream* stream) {
    for (auto r = ReadRequests(stream, 1); !r.empty(); r = ReadRequests(stream, 1)) {
      Answer(stream, r[0]);
    }
    return grpc::Status::OK;
  };
  auto stream = Open();
  constexpr int kThreads = 4, kPerThread = 50;
  std::atomic<int> answered{0};
  absl::BlockingCounter chains(kThreads);
  std::vector<std::unique_ptr<RequestFixture>> fixtures(kThreads);
  // Each chain sends its next request from the callback of the last one.
  std::function<void(int, int)> send = [&](int thread, int left) {
    fixtures[thread] = std::make_unique<RequestFixture>(absl::StrCat(thread, "-", left));
    const absl::Status sent = stream->Send(fixtures[thread]->request,
                                           [&, thread, left](absl::Status status, AttendResult) {
                                             if (status.ok()) ++answered;
                                             if (left > 1) {
                                               send(thread, left - 1);
                                             } else {
                                               chains.DecrementCount();
                                             }
                                           });
    EXPECT_EQ(sent, absl::OkStatus());
  };
  for (int thread = 0; thread < kThreads; ++thread) send(thread, kPerThread);
  chains.Wait();
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  EXPECT_EQ(answered, kThreads * kPerThread);
}

}  // namespace
}  // namespace flashcore
