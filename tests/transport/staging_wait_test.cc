// Requests that wait for staging memory, over the real gRPC server and a device held at its gate.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::kLong;
using testing::kRowBytes;

class StagingWaitTest : public testing::GatedServerTest {
 protected:
  static constexpr Nanoseconds kLonger = 10 * kLong;  // than the tests wait

  // Staging memory for two requests with one query row and `kv_rows` rows of K/V.
  void StartWith(Nanoseconds staging_wait, uint32_t kv_rows = 1) {
    kv_rows_ = kv_rows;
    Engine::Options engine;
    engine.staging_memory_bytes =
        2 * (StagingPool::SizeClass((2 * kv_rows + 1) * kRowBytes) + StagingPool::SizeClass(1));
    engine.staging_wait = staging_wait;
    engine.max_waiting_bytes = 1 << 20;
    Server::Options options = testing::ServerOptions();
    options.max_stream_inflight = 1000;
    StartFake(engine, options);
    staging_ = &engine_->staging();
  }
  ~StagingWaitTest() override {
    gate_.SetOpen(true);
    for (const auto& call : running_) {
      if (call->status.valid()) call->status.wait();
    }
  }

  v1::AttendRequest Request(const std::string& id = "") const {
    v1::AttendRequest request = testing::StepRequest({""});
    request.set_request_id(id);
    request.mutable_spans(0)->set_kv_rows(kv_rows_);
    request.mutable_key()->assign(kv_rows_ * kRowBytes, '\0');
    request.mutable_value()->assign(kv_rows_ * kRowBytes, '\0');
    return request;
  }

  std::unique_ptr<Call> Attend(std::chrono::milliseconds timeout = 10 * kLong) {
    return Send(Request(), "", timeout);
  }

  // Requests that take all memory and keep it until the gate opens.
  void FillMemory() {
    gate_.SetOpen(false);
    for (int i = 0; i < 2; ++i) running_.push_back(Attend());
    EXPECT_TRUE(
        testing::WaitUntil([&] { return staging_->used_bytes() == staging_->limit_bytes(); }));
  }
  void WaitForLine(size_t waiting) const {
    EXPECT_TRUE(testing::WaitUntil([&] { return staging_->waiting() == waiting; }));
  }

  // A LoadSequence whose one chunk waits for memory.
  struct Load {
    Load(StagingWaitTest* test, const std::string& id)
        : writer(test->stub_->LoadSequence(&context, &response)) {
      v1::LoadSequenceRequest chunk;
      chunk.set_sequence_id(id);
      chunk.set_layout(v1::LAYOUT_NHD);
      chunk.set_rows(1);
      chunk.set_key(std::string(kRowBytes, '\0'));
      chunk.set_value(std::string(kRowBytes, '\0'));
      EXPECT_TRUE(writer->Write(chunk));
      test->WaitForLine(1);
    }

    grpc::ClientContext context;
    v1::LoadSequenceResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::LoadSequenceRequest>> writer;
  };

  uint32_t kv_rows_ = 1;
  const StagingPool* staging_ = nullptr;        // of its only device
  std::vector<std::unique_ptr<Call>> running_;  // those that FillMemory began
};

TEST_F(StagingWaitTest, ARequestIsServedWhenMemoryComesBack) {
  clock_ = &fake_clock_;
  StartWith(kLong);
  FillMemory();
  auto waiting = Attend();
  WaitForLine(1);
  fake_clock_.Advance(std::chrono::milliseconds(20));
  gate_.SetOpen(true);
  EXPECT_TRUE(waiting->status.get().ok());
  EXPECT_EQ(waiting->response.timing().staging_wait_ns(), 20'000'000u);
  EXPECT_EQ(waiting->response.timing().receive_ns(), 0u);
  for (auto& call : running_) {
    EXPECT_TRUE(call->status.get().ok());
    EXPECT_EQ(call->response.timing().staging_wait_ns(), 0u);
  }
}

TEST_F(StagingWaitTest, AfterTheWaitItIsRefused) {
  StartWith(std::chrono::milliseconds(50));
  FillMemory();
  const grpc::Status refused = Attend()->status.get();
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("16384 of 16384 are in use"));
  EXPECT_THAT(refused.error_message(), HasSubstr("it has waited for 0.05 s"));
  EXPECT_EQ(staging_->waiting(), 0u);
}

TEST_F(StagingWaitTest, WithNoWaitItIsRefusedAtOnce) {
  StartWith(Nanoseconds(0));
  FillMemory();
  EXPECT_EQ(Attend()->status.get().error_code(), grpc::RESOURCE_EXHAUSTED);
}

TEST_F(StagingWaitTest, ADeadlineEndsTheWait) {
  StartWith(kLonger);
  FillMemory();
  const auto waits = [&] {
    const RpcMetrics& rpc = *metrics_->Rpc(v1::AttentionService::service_full_name(), "Attend");
    return rpc.staging_wait_seconds().Collect().histogram.sample_count;
  };
  // Longer and longer deadlines, until the request is in line before its deadline.
  for (std::chrono::milliseconds timeout(100); waits() == 0; timeout *= 2) {
    ASSERT_LT(timeout, kLong);
    EXPECT_EQ(Attend(timeout)->status.get().error_code(), grpc::DEADLINE_EXCEEDED);
    EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 2; }));
  }
  WaitForLine(0);
  gate_.SetOpen(true);
  for (auto& call : running_) EXPECT_TRUE(call->status.get().ok());
  size_t launched = 0;
  for (const auto& launch : gate_.launches()) launched += launch.size();
  EXPECT_EQ(launched, 2u);
}

TEST_F(StagingWaitTest, ACancelledRequestLeavesTheLineAtOnce) {
  StartWith(kLonger);
  FillMemory();
  auto cancelled = Attend();
  WaitForLine(1);
  cancelled->context.TryCancel();
  EXPECT_EQ(cancelled->status.get().error_code(), grpc::CANCELLED);
  WaitForLine(0);
}

TEST_F(StagingWaitTest, ADrainAnswersThoseThatWait) {
  StartWith(kLong);
  FillMemory();
  auto waiting = Attend();
  WaitForLine(1);
  auto drained =
      std::async(std::launch::async, [&] { return server_->Drain(absl::FromChrono(kLong)); });
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->serving.Value() == 0; }));
  gate_.SetOpen(true);
  EXPECT_TRUE(waiting->status.get().ok());
  EXPECT_TRUE(drained.get());
}

TEST_F(StagingWaitTest, AServerThatStopsEndsThoseThatWait) {
  StartWith(kLonger);
  FillMemory();
  auto waiting = Attend();
  WaitForLine(1);
  auto stopped = std::async(std::launch::async, [&] { server_.reset(); });
  EXPECT_FALSE(waiting->status.get().ok());
  WaitForLine(0);
  gate_.SetOpen(true);
  stopped.get();
}

TEST_F(StagingWaitTest, ALoadWaitsForTheMemoryOfItsNextChunk) {
  StartWith(kLong);
  const std::string id = Create();
  FillMemory();
  Load load(this, id);
  gate_.SetOpen(true);
  load.writer->WritesDone();
  EXPECT_TRUE(load.writer->Finish().ok());
  EXPECT_EQ(load.response.sequence().layer_lengths(0), 1u);
}

TEST_F(StagingWaitTest, ACancelledLoadLeavesTheLineAtOnce) {
  StartWith(kLonger);
  const std::string id = Create();
  FillMemory();
  Load load(this, id);
  load.context.TryCancel();
  EXPECT_EQ(load.writer->Finish().error_code(), grpc::CANCELLED);
  WaitForLine(0);
}

TEST_F(StagingWaitTest, AStreamHoldsOneWaitingMessageAndItsClientStalls) {
  constexpr int kRequests = 64;
  StartWith(kLong, /*kv_rows=*/4096);  // half a MiB of K/V
  gate_.SetOpen(false);
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  std::atomic<int> written{0};
  std::thread writer([&] {
    for (int i = 0; i < kRequests; ++i, ++written) {
      ASSERT_TRUE(stream->Write(Request(std::to_string(i))));
    }
    stream->WritesDone();
  });
  WaitForLine(1);
  int before;
  do {  // until the network's windows are full
    before = written;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  } while (before != written);
  EXPECT_LT(written, kRequests / 2);
  EXPECT_EQ(staging_->waiting(), 1u);
  EXPECT_EQ(metrics_->inflight_requests.Value(), 3);  // two have memory
  gate_.SetOpen(true);
  v1::AttendResponse response;
  int answered = 0;
  for (; stream->Read(&response); ++answered) EXPECT_FALSE(response.has_status());
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered, kRequests);
}

TEST_F(StagingWaitTest, ACancelledStreamLeavesTheLine) {
  StartWith(kLonger);
  gate_.SetOpen(false);
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(stream->Write(Request(std::to_string(i))));
  WaitForLine(1);
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
  WaitForLine(0);
  gate_.SetOpen(true);
  EXPECT_TRUE(server_->Drain(absl::FromChrono(kLong)));
  EXPECT_EQ(staging_->used_bytes(), 0u);
}

TEST_F(StagingWaitTest, ManyClientsShareLittleMemoryAndNoneIsRefused) {
  StartWith(kLong);
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 100; ++i) calls.push_back(Attend());
  for (auto& call : calls) {
    const grpc::Status status = call->status.get();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
}

}  // namespace
}  // namespace flashcore::server
