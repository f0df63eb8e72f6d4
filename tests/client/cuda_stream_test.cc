// Requests in the order of CUDA streams, in the C++ client.
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "flashcore/error_info.h"
#include "gmock/gmock.h"
#include "tests/client/cpp_device_fixture.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

constexpr int kSlots = 64;  // of the client's ring

class CudaStreamTest : public CppDeviceTest {
 protected:
  CudaStreamTest() {
    server_.on_attend = [this](const v1::AttendRequest& r) { return On(r); };
  }
  ~CudaStreamTest() override {
    memory_.reset();
    Close();
  }

  void Start() { memory_ = std::make_unique<DeviceMemory>(Allocate()); }

  CallHandle Submit(CUstream stream, int i, const CallOptions& call = {}) {
    return SubmitRequest(stream, Request(*memory_, i), call);
  }
  CallHandle SubmitRequest(CUstream stream, AttendRequest request, const CallOptions& call = {}) {
    request.request_id = absl::StrCat(outcomes_.size());
    return client_->AttendOnCudaStream(request, stream, outcomes_.emplace_back().Callback(), call);
  }
  // Lets the stream set Q of request i to what O of request i - 1 is then, and 1 more.
  void Step(CUstream stream, int i) {
    steps_.push_back({memory_.get(), i});
    const auto run = [](void* step) {
      const auto [memory, number] = *static_cast<StepOf*>(step);
      Query(*memory, number) = (number == 0 ? 0 : Output(*memory, number - 1)) + 1;
    };
    EXPECT_EQ(cuLaunchHostFunc(stream, run, &steps_.back()), 0);
  }
  // A request of as many sequences, in all of the memory.
  AttendRequest WithSpans(int spans) const {
    AttendRequest request = Request(*memory_, 0);
    request.spans.clear();
    for (int i = 0; i < spans; ++i) {
      request.spans.push_back({1, 0, absl::StrCat("0123456789", 100'000 + i), uint64_t{9}});
    }
    request.query = {memory_->address(), request.QueryBytes()};
    request.output = {memory_->address() + memory_->bytes() / 2, request.QueryBytes()};
    return request;
  }
  absl::StatusCode CodeOf(size_t i) { return outcomes_[i].Wait().code(); }
  // A request that is refused before this returns.
  absl::Status Refused(CUstream stream, const AttendRequest& request) {
    SubmitRequest(stream, request);
    EXPECT_TRUE(outcomes_.back().done.HasBeenNotified());
    return outcomes_.back().Wait();
  }
  uint64_t OutputOf(int i) { return Output(*memory_, i); }

  CudaStreams streams_;
  CUstream const stream_ = streams_.New();
  std::unique_ptr<DeviceMemory> memory_;
  std::deque<Outcome> outcomes_;  // of the requests, in their order
  std::function<v1::Status(const v1::AttendRequest&)> on_attend_;  // set it before the first one

 private:
  struct StepOf {
    DeviceMemory* memory;
    int i;
  };
  v1::Status On(const v1::AttendRequest& request) const {
    return on_attend_ == nullptr ? v1::Status() : on_attend_(request);
  }

  std::deque<StepOf> steps_;
};

TEST_F(CudaStreamTest, ALayerUsesTheOneBeforeAndTheHostWaitsForNone) {
  constexpr int kLayers = 3 * kSlots;  // more than the ring has room for
  Start();
  Gate gate(stream_);
  for (int i = 0; i < kLayers; ++i) {
    Step(stream_, i);
    Submit(stream_, i);
  }
  WaitFor([&] { return server_.taken() == kSlots; });
  EXPECT_FALSE(outcomes_[0].done.HasBeenNotified()) << "no input is there";
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(OutputOf(kLayers - 1), uint64_t{kLayers});
  for (Outcome& outcome : outcomes_) EXPECT_EQ(outcome.Wait(), absl::OkStatus());
  EXPECT_EQ(outcomes_[5].result.request_id, "5");
  EXPECT_EQ(outcomes_[5].result.attempts, 1);
}

TEST_F(CudaStreamTest, TheStreamGoesOnAfterAnErrorWhichTheCallbackTells) {
  on_attend_ = [](const v1::AttendRequest& request) {
    v1::Status status;
    if (request.request_id() == "1") status.set_code(3);
    return status;
  };
  Start();
  for (int i = 0; i < 3; ++i) {
    Step(stream_, i);
    Submit(stream_, i);
  }
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(CodeOf(0), absl::StatusCode::kOk);
  EXPECT_EQ(CodeOf(1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf(2), absl::StatusCode::kOk);
  EXPECT_EQ(OutputOf(2), 1u) << "O of the failed request is as it was: 0";
}

// Those that wait for a slot of the ring, too. Nothing is retried.
TEST_F(CudaStreamTest, StreamsGoOnWhenTheServerEnds) {
  Start();
  server_.Hold(true);
  CUstream const other = streams_.New();
  for (int i = 0; i < kSlots + 2; ++i) Submit(i % 2 == 0 ? stream_ : other, i);
  server_.Stop();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(cuStreamSynchronize(other), 0);
  for (Outcome& outcome : outcomes_) {
    EXPECT_EQ(outcome.Wait().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(outcome.result.attempts, 1);
  }
  EXPECT_EQ(Refused(stream_, Request(*memory_, 0)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0) << "nothing waits for what was refused";
}

TEST_F(CudaStreamTest, TheNextConnectionHasCountersOfItsOwn) {
  Start();
  Submit(stream_, 0);
  EXPECT_EQ(CodeOf(0), absl::StatusCode::kOk);
  server_.Stop();
  server_.Start();
  WaitFor([&] { return !memory_->registered(); });
  EXPECT_EQ(GetErrorInfo(Refused(stream_, Request(*memory_, 0))).reason, "REGION_LOST");
  *memory_ = Allocate();
  Query(*memory_, 1) = 7;
  Submit(stream_, 1);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(outcomes_.back().Wait(), absl::OkStatus());
  EXPECT_EQ(OutputOf(1), 7u);
  EXPECT_EQ(fake_cuda_alive("registrations"), 1);
}

TEST_F(CudaStreamTest, ARequestThatIsGivenUpReleasesItsStream) {
  Start();
  Gate gate(stream_);
  for (int i = 0; i < kSlots; ++i) Submit(stream_, i);
  CallHandle cancelled = Submit(stream_, kSlots);  // waits for a slot, as the next
  CallOptions soon;
  soon.deadline = absl::Now() + absl::Milliseconds(50);
  Submit(stream_, kSlots + 1, soon);
  cancelled.Cancel();
  EXPECT_EQ(CodeOf(kSlots), absl::StatusCode::kCancelled);
  EXPECT_EQ(CodeOf(kSlots + 1), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(server_.submitted(), uint64_t{kSlots}) << "the others have not ended";
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(CodeOf(kSlots - 1), absl::StatusCode::kOk);
  WaitFor([&] { return server_.cancelled() >= 1; });
}

TEST_F(CudaStreamTest, ACancelledRequestReleasesItsStream) {
  Start();
  server_.Hold(true);
  CallHandle in_ring = Submit(stream_, 0);
  EXPECT_EQ(server_.submitted(), 1u);
  in_ring.Cancel();
  EXPECT_EQ(CodeOf(0), absl::StatusCode::kCancelled);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

TEST_F(CudaStreamTest, LongMessagesGoAsCalls) {
  Start();
  Step(stream_, 0);
  SubmitRequest(stream_, WithSpans(200));
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(outcomes_.back().Wait(), absl::OkStatus());
  EXPECT_EQ(server_.submitted(), 0u);
  EXPECT_GT(outcomes_.back().result.request_bytes, 4096u);
  EXPECT_EQ(outcomes_.back().result.sequence_lengths.size(), 200u);

  *memory_ = Allocate(4 << 20);
  const absl::Status status = Refused(stream_, WithSpans(60'000));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("fewer spans"));
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

// Its stream awaits the answer.
TEST_F(CudaStreamTest, ACallIsSentHoweverLateTheServerReads) {
  constexpr int kSpans = 20'000;  // two such messages do not fit in the buffers of a socket
  absl::Notification reading, go_on;
  server_.on_call = [&](const v1::LocalCall&, std::string*) {
    reading.Notify();
    go_on.WaitForNotification();
    return v1::Status();
  };
  memory_ = std::make_unique<DeviceMemory>(Allocate(2 * kSpans * kRowBytes));
  Submit(stream_, 0);  // opens the ring and the counters
  EXPECT_EQ(CodeOf(0), absl::StatusCode::kOk);
  std::thread caller([this] { EXPECT_EQ(client_->GetServerInfo().status(), absl::OkStatus()); });
  reading.WaitForNotification();
  SubmitRequest(stream_, WithSpans(kSpans));
  CallOptions soon;
  soon.deadline = absl::Now() + absl::Milliseconds(50);
  SubmitRequest(stream_, WithSpans(kSpans), soon);
  EXPECT_EQ(CodeOf(2), absl::StatusCode::kDeadlineExceeded);
  go_on.Notify();
  caller.join();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(CodeOf(1), absl::StatusCode::kOk);
}

TEST_F(CudaStreamTest, TensorsElsewhereAreRefused) {
  Start();
  alignas(16) static std::byte host[kRowBytes];
  AttendRequest request = Request(*memory_, 0);
  request.query = host;
  absl::Status status = Refused(stream_, request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("query: a request on a CUDA stream uses it in place"));
  request = Request(*memory_, 0);
  request.output = absl::MakeSpan(host);
  EXPECT_THAT(Refused(stream_, request).message(), HasSubstr("output: "));
  request.output = {memory_->address() + 8, kRowBytes};
  EXPECT_THAT(Refused(stream_, request).message(), HasSubstr("output: 16 bytes at offset 8"));
  request.output = {};
  EXPECT_THAT(Refused(stream_, request).message(), HasSubstr("output: 0 bytes"));
  EXPECT_EQ(server_.submitted(), 0u);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);

  const auto shared = client_->CreateSharedMemory(4096).value();  // as good as DeviceMemory
  request = Request(*memory_, 0);
  request.query = {shared->data(), kRowBytes};
  shared->data()[0] = std::byte{3};
  SubmitRequest(stream_, request);
  EXPECT_EQ(outcomes_.back().Wait(), absl::OkStatus());
  EXPECT_EQ(OutputOf(0), 3u);
}

TEST_F(CudaStreamTest, WhatTheDriverRefusesIsNotSubmitted) {
  Start();
  for (const std::string function : {"cuStreamGetCtx", "cuMemHostRegister", "cuStreamIsCapturing",
                                     "cuStreamGetId", "cuStreamBatchMemOp"}) {
    fake_cuda_fail(function.c_str(), 0, 999);
    EXPECT_EQ(Refused(stream_, Request(*memory_, 0)),
              absl::InternalError(function + ": unknown error"));
  }
  fake_cuda_capture(stream_, 1);
  const absl::Status captured = Refused(stream_, Request(*memory_, 0));
  EXPECT_EQ(captured.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(captured.message(), HasSubstr("captured"));
  fake_cuda_capture(stream_, 0);
  CallOptions past;
  past.deadline = absl::Now() - absl::Seconds(1);
  Submit(stream_, 0, past);
  EXPECT_EQ(outcomes_.back().Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(server_.submitted(), 0u);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  Submit(stream_, 0);
  EXPECT_EQ(outcomes_.back().Wait(), absl::OkStatus());
}

TEST_F(CudaStreamTest, ThreadsMayUseOneStream) {
  constexpr int kThreads = 4, kEach = 40;
  Start();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        client_->AttendOnCudaStream(Request(*memory_, i), stream_,
                                    [&](const absl::Status& status, const AttendResult&) {
                                      if (status.ok()) ++right;
                                    });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  WaitFor([&] { return right == kThreads * kEach; });
}

TEST_F(CudaStreamTest, ARequestOutlivesItsClient) {
  Start();
  Gate gate(stream_);
  Query(*memory_, 0) = 5;
  Submit(stream_, 0);
  client_.reset();
  gate.Open();
  EXPECT_EQ(outcomes_[0].Wait(), absl::OkStatus());
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(OutputOf(0), 5u);
}

}  // namespace
}  // namespace flashcore
