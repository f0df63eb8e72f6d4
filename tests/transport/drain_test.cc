// The answers of a drain, and how it ends. README: "Drain".
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

class DrainTest : public testing::GatedServerTest {
 protected:
  std::future<bool> Drain(absl::Duration timeout) {
    return std::async(std::launch::async, [this, timeout] { return server_->Drain(timeout); });
  }
  static v1::AttendRequest Request(const std::string& id) {
    v1::AttendRequest request = testing::StepRequest({""});
    request.set_request_id(id);
    return request;
  }
};

TEST_F(DrainTest, EachRequestOfAStreamHasAStatusOfItsOwn) {
  Server::Options options = testing::ServerOptions();
  options.max_stream_inflight = 10000;
  StartFake({}, options);
  gate_.SetOpen(false);
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  ASSERT_TRUE(stream->Write(Request("0")));
  ASSERT_TRUE(WaitForArrived(1));
  auto drained = Drain(absl::FromChrono(testing::kLong));
  // Those that come before the drain reaches the stream wait for the gate, the others are refused.
  std::atomic<bool> refused{false};
  int sent = 1;
  std::thread writer([&] {
    for (; !refused; ++sent) {
      ASSERT_TRUE(stream->Write(Request(std::to_string(sent))));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.status().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(response.status().message(), HasSubstr("the server drains"));
  refused = true;
  writer.join();
  ASSERT_TRUE(stream->Write(Request("last")));
  int answered = 1;
  while (response.request_id() != "last") {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_TRUE(response.has_status());
    ++answered;
  }
  gate_.SetOpen(true);
  for (; answered < sent + 1; ++answered) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_FALSE(response.has_status());
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::UNAVAILABLE);
  EXPECT_TRUE(drained.get());
}

TEST_F(DrainTest, RequestsThatWaitForMemoryAreAnsweredAtItsEnd) {
  clock_ = &fake_clock_;
  Engine::Options engine;
  engine.staging_memory_bytes = 8192;  // one request
  engine.staging_wait = testing::kLong;
  engine.max_waiting_bytes = 1 << 20;
  StartFake(engine);
  gate_.SetOpen(false);
  const auto running = Send(Request(""));
  ASSERT_TRUE(WaitForArrived(1));
  const auto waiting = Send(Request(""));
  ASSERT_TRUE(testing::WaitUntil([&] { return engine_->staging().waiting() == 1; }));
  auto drained = Drain(absl::Seconds(8));
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->serving.Value() == 0; }));
  fake_clock_.Advance(std::chrono::seconds(6));  // its end is the last quarter
  const grpc::Status status = waiting->status.get();
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("--drain_timeout_s"));
  fake_clock_.Advance(std::chrono::seconds(2));
  EXPECT_FALSE(drained.get());  // the launch is still running
  gate_.SetOpen(true);
  EXPECT_TRUE(running->status.get().ok());
}

TEST_F(DrainTest, OpenStreamsEndAtOnce) {
  StartFake();
  grpc::ClientContext attend_context, load_context;
  auto attend = stub_->AttendStream(&attend_context);
  v1::LoadSequenceResponse loaded;
  auto load = stub_->LoadSequence(&load_context, &loaded);
  EXPECT_TRUE(server_->Drain(absl::FromChrono(testing::kLong)));
  EXPECT_EQ(attend->Finish().error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(load->Finish().error_code(), grpc::UNAVAILABLE);
}

}  // namespace
}  // namespace flashcore::server
