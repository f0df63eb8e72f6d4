// Clients that send requests and never read the replies. gRPC stops sending when a stream's window
// is full, and the reply keeps its staging memory. README: "Slow readers".
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint32_t kRows = 8192;  // a reply of 512 KiB: several windows of HTTP/2
constexpr size_t kReplyBytes = kRows * testing::kRowBytes;

class SlowReaderTest : public testing::GatedServerTest {
 protected:
  // Unary calls on a connection of their own, whose replies are never asked for.
  class Reader {
   public:
    explicit Reader(std::unique_ptr<v1::AttentionService::Stub> stub) : stub_(std::move(stub)) {}
    ~Reader() { Leave(); }

    void Send(const v1::AttendRequest& request) {
      Call& call = *calls_.emplace_back(std::make_unique<Call>());
      call.context.set_deadline(std::chrono::system_clock::now() + deadline_);
      call.reader = stub_->AsyncAttend(&call.context, request, &queue_);
      call.reader->ReadInitialMetadata(&call);  // which also sends the request
    }
    void Leave() {
      for (auto& call : calls_) call->context.TryCancel();
      Finish();
      stub_.reset();
    }
    // Reads on. How each call ended.
    std::vector<grpc::StatusCode> Finish() {
      std::vector<grpc::StatusCode> codes;
      for (auto& call : calls_) {
        call->reader->Finish(&call->response, &call->status, call.get());
        void* tag = nullptr;
        bool ok = false;
        queue_.Next(&tag, &ok);  // of ReadInitialMetadata and of Finish
        queue_.Next(&tag, &ok);
      }
      for (auto& call : calls_) codes.push_back(call->status.error_code());
      calls_.clear();
      return codes;
    }
    void set_deadline(std::chrono::milliseconds deadline) { deadline_ = deadline; }

   private:
    struct Call {
      grpc::ClientContext context;
      v1::AttendResponse response;
      grpc::Status status;
      std::unique_ptr<grpc::ClientAsyncResponseReader<v1::AttendResponse>> reader;
    };
    std::unique_ptr<v1::AttentionService::Stub> stub_;
    grpc::CompletionQueue queue_;
    std::chrono::milliseconds deadline_ = 10 * testing::kLong;
    std::vector<std::unique_ptr<Call>> calls_;
  };

  // Memory for `requests` large ones.
  void StartWithRoomFor(int requests, Nanoseconds staging_wait,
                        const Server::Options& options = testing::ServerOptions(),
                        size_t client_staging_bytes = 0) {
    Engine::Options engine;
    engine.client_staging_bytes = client_staging_bytes;
    const size_t inputs = StagingPool::SizeClass(LargeRequest().query().size() + 2 * 64);
    engine.staging_memory_bytes = static_cast<size_t>(requests) * (inputs + result_bytes());
    engine.staging_wait = staging_wait;
    engine.max_waiting_bytes = 16 << 20;
    StartFake(engine, options);
  }
  std::unique_ptr<Reader> NewReader() {
    grpc::ChannelArguments arguments;
    // The client's transport itself reads no more than the windows of HTTP/2 at the start.
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return std::make_unique<Reader>(Connect(arguments));
  }

  static v1::AttendRequest LargeRequest() {
    v1::AttendRequest request = testing::StepRequest({""});
    request.mutable_spans(0)->set_query_rows(kRows);
    request.mutable_query()->assign(kReplyBytes, '\0');
    return request;
  }
  static size_t result_bytes() { return StagingPool::SizeClass(kReplyBytes); }
  // Each of `replies` is ready to be read, and keeps the memory of its results alone.
  bool WaitForUnread(size_t replies) const {
    return testing::WaitUntil([&] {
      const StagingPool& staging = engine_->staging();
      return staging.unread_bytes() == replies * result_bytes() &&
             staging.used_bytes() == replies * result_bytes();
    });
  }
};

TEST_F(SlowReaderTest, UnreadRepliesKeepTheirResultsAndOthersAreServed) {
  StartWithRoomFor(5, Nanoseconds(0));
  const auto reader = NewReader();
  for (int i = 0; i < 3; ++i) reader->Send(LargeRequest());
  ASSERT_TRUE(WaitForUnread(3));
  for (int i = 0; i < 20; ++i) {
    v1::AttendResponse response;
    const grpc::Status status = Attend(LargeRequest(), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.output().size(), kReplyBytes);
  }
  EXPECT_TRUE(
      testing::WaitUntil([&] { return engine_->staging().used_bytes() == 3 * result_bytes(); }));
  reader->Leave();
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(SlowReaderTest, UnreadRepliesThatFillTheMemoryRefuseOthersUntilTheirClientGoes) {
  StartWithRoomFor(2, std::chrono::milliseconds(50));
  const auto reader = NewReader();
  // 4 results take the memory of 2 requests; the last of them waits for the inputs of the others.
  size_t unread = 0;
  while (engine_->staging().limit_bytes() - engine_->staging().used_bytes() >=
         StagingPool::SizeClass(kReplyBytes + 2 * 64) + result_bytes()) {
    reader->Send(LargeRequest());
    ASSERT_TRUE(WaitForUnread(++unread));
  }
  const grpc::Status refused = Attend(LargeRequest());
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("it has waited for 0.05 s"));
  EXPECT_TRUE(Attend(testing::StepRequest({""})).ok()) << "small requests still fit";
  reader->Leave();
  EXPECT_TRUE(AllStagingReturns());
  EXPECT_TRUE(Attend(LargeRequest()).ok());
}

TEST_F(SlowReaderTest, ADeadlineReturnsTheMemoryOfAnUnreadReply) {
  StartWithRoomFor(2, Nanoseconds(0));
  const auto reader = NewReader();
  for (std::chrono::milliseconds deadline(250);; deadline *= 2) {
    ASSERT_LT(deadline, testing::kLong);
    reader->set_deadline(deadline);
    const auto end = std::chrono::system_clock::now() + deadline;
    reader->Send(LargeRequest());
    bool computed = false;
    const bool ended = testing::WaitUntil([&] {
      computed = engine_->staging().used_bytes() == result_bytes();
      const bool late = std::chrono::system_clock::now() > end;
      return computed || (late && metrics_->inflight_requests.Value() == 0);
    });
    ASSERT_TRUE(ended);
    if (computed) break;
  }
  EXPECT_TRUE(AllStagingReturns());  // the client still has not read
}

TEST_F(SlowReaderTest, ATimeoutReturnsTheMemoryOfUnreadReplies) {
  clock_ = &fake_clock_;
  Server::Options options = testing::ServerOptions();
  options.unsent_replies.timeout = testing::kLong;
  StartWithRoomFor(5, Nanoseconds(0), options);
  const auto reader = NewReader();
  for (int i = 0; i < 3; ++i) reader->Send(LargeRequest());
  ASSERT_TRUE(WaitForUnread(3));
  EXPECT_TRUE(testing::WaitUntil([&] {
    fake_clock_.Advance(testing::kLong);
    return metrics_->rejected_unread.Value() == 3;
  }));
  EXPECT_TRUE(AllStagingReturns());  // the client is still there
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
  EXPECT_TRUE(Attend(LargeRequest()).ok());
}

TEST_F(SlowReaderTest, UnreadRepliesOfOneClientTakeItsShareOnly) {
  const size_t inputs = StagingPool::SizeClass(LargeRequest().query().size() + 2 * 64);
  StartWithRoomFor(4, Nanoseconds(0), testing::ServerOptions(), inputs + 2 * result_bytes());
  const auto reader = NewReader();
  reader->Send(LargeRequest());
  ASSERT_TRUE(WaitForUnread(1));
  reader->Send(LargeRequest());
  ASSERT_TRUE(WaitForUnread(2));
  const grpc::Status refused = Attend(LargeRequest());
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--client_staging_bytes"));
  const auto other = Send(LargeRequest(), "other");
  EXPECT_TRUE(other->status.get().ok());
}

TEST_F(SlowReaderTest, OtherUnreadRepliesTakeTheClientsShareOfMemory) {
  Server::Options options = testing::ServerOptions();
  options.unsent_replies.bytes = {1 << 20, 8 * kRpcBytes};
  StartWithRoomFor(9, Nanoseconds(0), options);
  const auto reader = NewReader();
  for (int i = 0; i < 6; ++i) reader->Send(LargeRequest());  // a little more than kRpcBytes each
  ASSERT_TRUE(WaitForUnread(6));
  v1::ListSequencesResponse list;
  grpc::ClientContext context;
  const grpc::Status refused = stub_->ListSequences(&context, {}, &list);
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--unsent_reply_bytes"));
  EXPECT_EQ(testing::InfoOf(refused).reason(), "REPLIES_FULL");
  grpc::ClientContext stream_context;
  auto stream = stub_->AttendStream(&stream_context);
  EXPECT_EQ(testing::InfoOf(stream->Finish()).reason(), "REPLIES_FULL");
  const auto other = Send(LargeRequest(), "other");
  EXPECT_TRUE(other->status.get().ok());
  reader->Leave();
  EXPECT_TRUE(testing::WaitUntil([&] { return Attend(LargeRequest()).ok(); }));
}

TEST_F(SlowReaderTest, BeyondItsShareAClientsOldestRepliesAreCutOff) {
  Server::Options options = testing::ServerOptions();
  options.unsent_replies.bytes = {1 << 20, 4 * kRpcBytes};
  StartWithRoomFor(9, Nanoseconds(0), options);
  const auto reader = NewReader();
  gate_.SetOpen(false);
  for (int i = 0; i < 6; ++i) reader->Send(LargeRequest());  // in flight before one is unread
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 6; }));
  gate_.SetOpen(true);
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->rejected_unread.Value() == 3; }));
  ASSERT_TRUE(
      testing::WaitUntil([&] { return engine_->staging().used_bytes() == 3 * result_bytes(); }));
  const auto other = Send(LargeRequest(), "other");
  EXPECT_TRUE(other->status.get().ok());
}

TEST_F(SlowReaderTest, ADrainCutsOffThoseThatDoNotRead) {
  clock_ = &fake_clock_;
  StartWithRoomFor(5, Nanoseconds(0));
  const auto reader = NewReader();
  for (int i = 0; i < 3; ++i) reader->Send(LargeRequest());
  ASSERT_TRUE(WaitForUnread(3));
  auto drained = std::async(std::launch::async,
                            [&] { return server_->Drain(absl::FromChrono(testing::kLong)); });
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->serving.Value() == 0; }));
  fake_clock_.Advance(testing::kLong);
  EXPECT_TRUE(drained.get());
  EXPECT_TRUE(testing::WaitUntil([&] {
    fake_clock_.Advance(std::chrono::milliseconds(50));  // until connections are looked at
    return metrics_->inflight_requests.Value() == 0;
  }));
  EXPECT_TRUE(AllStagingReturns());
  EXPECT_THAT(reader->Finish(), Each(grpc::UNAVAILABLE));  // not CANCELLED
}

TEST_F(SlowReaderTest, AStreamThatIsReadLateHasEveryAnswer) {
  const Server::Options options = testing::ServerOptions();
  StartFake({}, options);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const auto stub = Connect(arguments);
  grpc::ClientContext context;
  const auto stream = stub->AttendStream(&context);
  const int requests = 4 * options.max_stream_inflight;
  std::thread writer([&] {
    for (int i = 0; i < requests; ++i) {
      v1::AttendRequest request = LargeRequest();
      request.set_request_id(std::to_string(i));
      EXPECT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  // Its answers queue, and it is not read beyond its limit.
  const auto held = static_cast<size_t>(options.max_stream_inflight);
  EXPECT_TRUE(
      testing::WaitUntil([&] { return engine_->staging().used_bytes() == held * result_bytes(); }));
  std::set<std::string> answered;
  v1::AttendResponse response;
  while (stream->Read(&response)) {
    EXPECT_TRUE(answered.insert(response.request_id()).second);
    EXPECT_EQ(response.output().size(), kReplyBytes);
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered.size(), static_cast<size_t>(requests));
  EXPECT_TRUE(AllStagingReturns());
}

// Its connection breaks, as when its process dies.
TEST_F(SlowReaderTest, AStreamThatIsNeverReadHoldsWhatItMayAndReturnsIt) {
  Server::Options options = testing::ServerOptions();
  Engine::Options engine;
  StartFake(engine, options);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  auto stub = Connect(arguments);
  auto context = std::make_unique<grpc::ClientContext>();
  auto stream = stub->AttendStream(context.get());
  std::thread writer([&] {
    for (int i = 0; i < 4 * options.max_stream_inflight; ++i) {
      v1::AttendRequest request = LargeRequest();
      request.set_request_id(std::to_string(i));
      if (!stream->Write(request)) return;
    }
  });
  // It is not read beyond its limit: after one launch more than are unanswered, no more come.
  const auto held = static_cast<size_t>(options.max_stream_inflight);
  EXPECT_TRUE(testing::WaitUntil([&] {
    return metrics_->inflight_requests.Value() == options.max_stream_inflight &&
           engine_->staging().used_bytes() == held * result_bytes();
  }));
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(Attend(LargeRequest()).ok());
    EXPECT_TRUE(testing::WaitUntil(
        [&] { return metrics_->inflight_requests.Value() <= options.max_stream_inflight; }));
  }
  context->TryCancel();
  writer.join();
  stream->Finish();
  EXPECT_TRUE(AllStagingReturns());
}

}  // namespace
}  // namespace flashcore::server
