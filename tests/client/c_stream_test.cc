// Requests in the order of CUDA streams, in the C interface.
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/client/c_device_fixture.h"

namespace flashcore {
namespace {

using testing::HasSubstr;

class CStreamTest : public CDeviceTest {
 protected:
  static constexpr size_t kRowBytes = 16;  // of Q and of O
  static constexpr int kMaxRequests = 100;

  ~CStreamTest() override { Close(); }

  CUstream NewStream() { return streams_.New(); }
  void Start(uint32_t slots = 64) {
    Connect(slots);
    ASSERT_EQ(Allocate(2 * kMaxRequests * kRowBytes, &memory_), FLASHCORE_OK);
  }

  // Request number i has a row of Q, which the server copies to its row of O.
  uint64_t& Query(int i) { return Row(2 * i); }
  uint64_t& Output(int i) { return Row(2 * i + 1); }
  std::string Request(int i) const {
    v1::AttendRequest request;
    request.set_request_id(std::to_string(i));
    request.add_spans()->set_query_rows(1);
    request.set_num_heads(1);
    request.set_head_dim(kRowBytes / 2);
    const auto set_range = [this](int row, v1::MemoryRange* range) {
      range->set_region_id(memory_.region_id, sizeof(memory_.region_id));
      range->set_offset(static_cast<size_t>(row) * kRowBytes);
      range->set_bytes(kRowBytes);
    };
    set_range(2 * i, request.mutable_query_range());
    set_range(2 * i + 1, request.mutable_output_range());
    return request.SerializeAsString();
  }
  int SubmitOn(CUstream stream, int i, int64_t timeout_ns = kTimeout) {
    const std::string request = Request(i);
    return flashcore_submit_on_stream(client_, static_cast<uint64_t>(i), request.data(),
                                      request.size(), timeout_ns, stream);
  }
  // The status code in the next completion, which is of request i.
  int Complete(int i) {
    flashcore_completion completion;
    EXPECT_EQ(flashcore_wait(client_, kTimeout, &completion), FLASHCORE_OK)
        << flashcore_last_error();
    EXPECT_EQ(completion.tag, static_cast<uint64_t>(i));
    v1::AttendResponse response;
    response.ParseFromArray(completion.response, static_cast<int>(completion.response_bytes));
    return response.status().code();
  }

  // Lets the stream set Q of request i to what O of request i - 1 is then, and 1 more.
  void Step(CUstream stream, int i) {
    steps_.push_back(std::make_unique<StepOf>(StepOf{this, i}));
    const auto run = [](void* step) {
      const auto [test, number] = *static_cast<StepOf*>(step);
      test->Query(number) = (number == 0 ? 0 : test->Output(number - 1)) + 1;
    };
    EXPECT_EQ(cuLaunchHostFunc(stream, run, steps_.back().get()), 0);
  }

  flashcore_device_memory memory_ = {};
  CudaStreams streams_;
  CUstream const stream_ = NewStream();

 private:
  struct StepOf {
    CStreamTest* test;
    int i;
  };

  uint64_t& Row(int row) {
    return *reinterpret_cast<uint64_t*>(memory_.address + static_cast<size_t>(row) * kRowBytes);
  }

  std::vector<std::unique_ptr<StepOf>> steps_;
};

TEST_F(CStreamTest, ALayerUsesTheOneBeforeAndTheHostWaitsForNone) {
  constexpr int kLayers = 40;
  Start();
  Gate gate(stream_);
  for (int i = 0; i < kLayers; ++i) {
    Step(stream_, i);
    ASSERT_EQ(SubmitOn(stream_, i), FLASHCORE_OK) << flashcore_last_error();
  }
  WaitFor([&] { return server_.taken() == kLayers; });
  flashcore_completion completion;
  EXPECT_EQ(flashcore_poll(client_, &completion), FLASHCORE_AGAIN) << "no input is there";
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Output(kLayers - 1), static_cast<uint64_t>(kLayers));
  for (int i = 0; i < kLayers; ++i) EXPECT_EQ(Complete(i), 0);
  EXPECT_EQ(server_.regions(), 3u) << "of the ring, the memory and the counters";
}

TEST_F(CStreamTest, TheStreamGoesOnAfterAnErrorWhichTheCompletionTells) {
  server_.on_attend = [](const v1::AttendRequest& request) {
    v1::Status status;
    if (request.request_id() == "1") status.set_code(kInvalidArgument);
    return status;
  };
  Start();
  for (int i = 0; i < 3; ++i) {
    Step(stream_, i);
    ASSERT_EQ(SubmitOn(stream_, i), FLASHCORE_OK);
  }
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Complete(0), 0);
  EXPECT_EQ(Complete(1), kInvalidArgument);
  EXPECT_EQ(Complete(2), 0);
  EXPECT_EQ(Output(2), 1u) << "O of the failed request is as it was: 0";
}

TEST_F(CStreamTest, StreamsDoNotWaitForEachOther) {
  Start();
  CUstream const other = NewStream();
  Gate gate(stream_);
  Query(0) = 5, Query(1) = 6;
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  ASSERT_EQ(SubmitOn(other, 1), FLASHCORE_OK);
  EXPECT_EQ(cuStreamSynchronize(other), 0);
  EXPECT_EQ(Output(1), 6u);
  EXPECT_EQ(Complete(1), 0);
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Output(0), 5u);
  EXPECT_EQ(Complete(0), 0);
}

TEST_F(CStreamTest, StreamsGoOnWhenTheServerEnds) {
  Start();
  server_.Hold(true);
  CUstream const other = NewStream();
  for (int i = 0; i < 4; ++i) ASSERT_EQ(SubmitOn(i < 3 ? stream_ : other, i), FLASHCORE_OK);
  server_.Stop();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(cuStreamSynchronize(other), 0);
  EXPECT_EQ(SubmitOn(stream_, 4), kUnavailable);
  flashcore_completion completion;
  EXPECT_EQ(flashcore_wait(client_, kTimeout, &completion), kUnavailable);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0) << "nothing waits for what was refused";
}

TEST_F(CStreamTest, StreamsGoOnAfterShutdown) {
  Start();
  server_.Hold(true);
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  flashcore_shutdown(client_);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(SubmitOn(stream_, 1), kCancelled);
}

// The server's GPU writes what it has begun, and sets the counter back.
TEST_F(CStreamTest, ALateWriteOfTheServerHoldsNoStream) {
  v1::TimelinePoint first;
  server_.on_attend = [&](const v1::AttendRequest& request) {
    first = request.results_ready();
    return v1::Status();
  };
  Start();
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  EXPECT_EQ(Complete(0), 0);
  const auto counter = server_.Counter(first);
  server_.Hold(true);
  Gate gate(stream_);
  for (int i = 1; i < 4; ++i) ASSERT_EQ(SubmitOn(stream_, i), FLASHCORE_OK);
  flashcore_shutdown(client_);
  EXPECT_EQ(counter->load(), 4u);
  counter->store(2);
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

TEST_F(CStreamTest, CloseWaitsForStreams) {
  Start();
  server_.Hold(true);
  Gate gate(stream_);
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  std::thread closing([this] { Close(); });
  WaitFor([&] { return server_.rings() == 0; });  // the connection has ended
  EXPECT_EQ(fake_cuda_alive("registrations"), 1) << "the stream will use it";
  gate.Open();
  closing.join();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

TEST_F(CStreamTest, AFullRingEnqueuesNothing) {
  Start(/*slots=*/2);
  Gate gate(stream_);
  for (int i = 0; i < 2; ++i) {
    Step(stream_, i);
    ASSERT_EQ(SubmitOn(stream_, i), FLASHCORE_OK);
  }
  EXPECT_EQ(SubmitOn(stream_, 2), FLASHCORE_AGAIN);
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Complete(0), 0);
  Step(stream_, 2);
  EXPECT_EQ(SubmitOn(stream_, 2), FLASHCORE_OK);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Output(2), 3u);
}

TEST_F(CStreamTest, ARequestTakesSeventyBytesMoreOfItsSlot) {
  Start();
  std::string request = Request(0);
  constexpr size_t kMost = 16384 - 24 - 70;  // the default slot without its header
  const auto submit = [&](size_t bytes) {
    v1::AttendRequest padded;
    padded.ParseFromString(request);
    padded.set_request_id(std::string(1000, 'x'));
    padded.set_request_id(std::string(bytes - padded.ByteSizeLong() + 1000, 'x'));
    const std::string message = padded.SerializeAsString();
    EXPECT_EQ(message.size(), bytes);
    return flashcore_submit_on_stream(client_, 0, message.data(), message.size(), kTimeout,
                                      stream_);
  };
  EXPECT_EQ(submit(kMost + 1), kResourceExhausted);
  EXPECT_THAT(flashcore_last_error(), HasSubstr(std::to_string(kMost)));
  EXPECT_EQ(submit(kMost), FLASHCORE_OK);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

TEST_F(CStreamTest, InputsThatComeAfterTheDeadlineAreNotAwaited) {
  Start();
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);  // makes the counters, without a deadline
  EXPECT_EQ(Complete(0), 0);
  Gate gate(stream_);
  ASSERT_EQ(SubmitOn(stream_, 1, /*timeout_ns=*/1'000'000), FLASHCORE_OK);
  EXPECT_EQ(Complete(1), kDeadlineExceeded);
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
}

TEST_F(CStreamTest, ACancelledRequestReleasesItsStream) {
  Start();
  server_.Hold(true);
  ASSERT_EQ(SubmitOn(stream_, 7), FLASHCORE_OK);
  EXPECT_EQ(flashcore_cancel(client_, 7), FLASHCORE_OK);
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Complete(7), kCancelled);
}

TEST_F(CStreamTest, WhatTheDriverRefusesIsNotSubmitted) {
  Start();
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  EXPECT_EQ(Complete(0), 0);
  for (const std::string function :
       {"cuStreamIsCapturing", "cuStreamGetId", "cuStreamBatchMemOp"}) {
    fake_cuda_fail(function.c_str(), 0, 999);
    EXPECT_EQ(SubmitOn(stream_, 1), kInternal) << function;
    EXPECT_EQ(flashcore_last_error(), function + ": unknown error");
  }
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(server_.submitted(), 1u);
  Gate gate(stream_);
  Step(stream_, 2);
  ASSERT_EQ(SubmitOn(stream_, 2), FLASHCORE_OK);
  WaitFor([&] { return server_.taken() == 2; });
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  EXPECT_EQ(Output(2), 1u) << "the request waits for its own inputs";
  EXPECT_EQ(Complete(2), 0);
}

TEST_F(CStreamTest, CountersThatCannotBeMadeLeaveNothing) {
  Start();
  for (const std::string function :
       {"cuStreamGetCtx", "cuCtxPushCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer"}) {
    fake_cuda_fail(function.c_str(), 0, 2);
    EXPECT_EQ(SubmitOn(stream_, 0), kResourceExhausted);
    EXPECT_EQ(flashcore_last_error(), function + ": out of memory");
    EXPECT_EQ(fake_cuda_alive("registrations"), 0);
    EXPECT_EQ(fake_cuda_alive("current"), 1) << "of this test";
  }
  EXPECT_EQ(server_.submitted(), 0u);
  EXPECT_EQ(server_.regions(), 2u);
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK) << flashcore_last_error();
  EXPECT_EQ(Complete(0), 0);
}

TEST_F(CStreamTest, CountersThatTheServerRefusesLeaveNothing) {
  std::atomic<bool> refuse{false};
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (!refuse || !request.has_register_memory()) return false;
    reply->mutable_status()->set_code(kResourceExhausted);
    return true;
  };
  Start();
  refuse = true;
  EXPECT_EQ(SubmitOn(stream_, 0), kResourceExhausted);
  EXPECT_EQ(fake_cuda_alive("registrations"), 0);
  refuse = false;
  EXPECT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  EXPECT_EQ(Complete(0), 0);
}

TEST_F(CStreamTest, AStreamThatIsCapturedIsRefused) {
  Start();
  fake_cuda_capture(stream_, 1);
  EXPECT_EQ(SubmitOn(stream_, 0), kFailedPrecondition);
  EXPECT_THAT(flashcore_last_error(), HasSubstr("captured"));
  fake_cuda_capture(stream_, 0);
  EXPECT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  EXPECT_EQ(Complete(0), 0);
}

TEST_F(CStreamTest, TheDefaultStreamNeedsACurrentContext) {
  Start();
  int without = FLASHCORE_OK;
  std::string error;
  std::thread([&] {
    without = SubmitOn(nullptr, 0);
    error = flashcore_last_error();
  }).join();
  EXPECT_EQ(without, kFailedPrecondition);
  EXPECT_THAT(error, HasSubstr("context that is current in this thread"));
  std::thread([&] {
    EXPECT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK) << "another needs none";
  }).join();
  EXPECT_EQ(Complete(0), 0);
}

TEST_F(CStreamTest, CountersOfAStreamWithoutRequestsServeAnother) {
  constexpr int kStreams = 64;
  Start(/*slots=*/128);
  for (int i = 0; i <= kStreams; ++i) {  // one after the other
    CUstream stream = nullptr;
    ASSERT_EQ(cuStreamCreate(&stream, 1), 0);
    Query(0) = static_cast<uint64_t>(i);
    ASSERT_EQ(SubmitOn(stream, 0), FLASHCORE_OK) << flashcore_last_error();
    EXPECT_EQ(cuStreamSynchronize(stream), 0);
    EXPECT_EQ(Output(0), static_cast<uint64_t>(i));
    EXPECT_EQ(cuStreamDestroy_v2(stream), 0);
    EXPECT_EQ(Complete(0), 0);
  }
}

TEST_F(CStreamTest, CountersServeNoOtherWhileARequestOrItsStreamUsesThem) {
  Start(/*slots=*/128);
  ASSERT_EQ(SubmitOn(stream_, 0), FLASHCORE_OK);
  EXPECT_EQ(Complete(0), 0);
  Gate gate(stream_);  // the stream has still to write that its inputs are ready
  ASSERT_EQ(SubmitOn(stream_, 1, /*timeout_ns=*/1'000'000), FLASHCORE_OK);
  EXPECT_EQ(Complete(1), kDeadlineExceeded);
  server_.Hold(true);
  for (int i = 2; i <= 64; ++i) {
    ASSERT_EQ(SubmitOn(NewStream(), i), FLASHCORE_OK) << flashcore_last_error();
  }
  CUstream const other = NewStream();
  EXPECT_EQ(SubmitOn(other, 65), kResourceExhausted);
  EXPECT_THAT(flashcore_last_error(), HasSubstr("64 other streams"));
  gate.Open();
  EXPECT_EQ(cuStreamSynchronize(stream_), 0);
  Query(65) = 7;
  EXPECT_EQ(SubmitOn(other, 65), FLASHCORE_OK) << flashcore_last_error();
  server_.Hold(false);
  EXPECT_EQ(cuStreamSynchronize(other), 0);
  EXPECT_EQ(Output(65), 7u);
}

TEST_F(CStreamTest, BadArgumentsSubmitNothing) {
  Start();
  EXPECT_EQ(flashcore_submit_on_stream(nullptr, 0, nullptr, 0, kTimeout, stream_),
            kInvalidArgument);
  EXPECT_EQ(flashcore_submit_on_stream(client_, 0, nullptr, 1, kTimeout, stream_),
            kInvalidArgument);
  EXPECT_EQ(flashcore_submit_on_stream(client_, 0, nullptr, 0, 0, stream_), kDeadlineExceeded);
  EXPECT_EQ(server_.submitted(), 0u);
  EXPECT_EQ(fake_cuda_alive("registrations"), 0);
}

}  // namespace
}  // namespace flashcore
