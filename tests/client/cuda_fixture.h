// A fake server of the local socket, and a fake driver of GPUs, for the C and the C++ client.
#ifndef FLASHCORE_TESTS_CLIENT_CUDA_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_CUDA_FIXTURE_H_

#include <sched.h>

#include <cstddef>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/client/fake_cuda/fake_cuda.h"
#include "tests/client/fake_local_server.h"

namespace flashcore {

// Looks at a state that another thread changes, until it is so.
template <typename Condition>
void WaitFor(const Condition& condition) {
  while (!condition()) sched_yield();
}

// An operation of a stream that lasts until Open, or the end of this object.
class Gate {
 public:
  explicit Gate(CUstream stream) {
    const auto run = [](void* gate) { static_cast<Gate*>(gate)->Run(); };
    EXPECT_EQ(cuLaunchHostFunc(stream, run, this), 0);
  }
  ~Gate() {
    Open();
    passed_.WaitForNotification();
  }
  void Open() {
    if (!open_.HasBeenNotified()) open_.Notify();
  }

 private:
  void Run() {
    open_.WaitForNotification();
    passed_.Notify();
  }

  absl::Notification open_, passed_;
};

// Streams of a context that is current on this thread meanwhile.
class CudaStreams {
 public:
  CudaStreams() {
    cuInit(0);
    CUcontext context = nullptr;
    EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, 0), 0);
    EXPECT_EQ(cuCtxPushCurrent_v2(context), 0);
  }
  ~CudaStreams() {
    for (CUstream const stream : streams_) EXPECT_EQ(cuStreamDestroy_v2(stream), 0);
    CUcontext popped = nullptr;
    EXPECT_EQ(cuCtxPopCurrent_v2(&popped), 0);
    EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), 0);
  }
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;

  CUstream New() {
    CUstream stream = nullptr;
    EXPECT_EQ(cuStreamCreate(&stream, 1), 0);
    streams_.push_back(stream);
    return stream;
  }

 private:
  std::vector<CUstream> streams_;
};

// At its end, nothing of the driver may be left.
class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest() { fake_cuda_reset(); }
  ~FakeCudaTest() override {
    for (const char* kind :
         {"contexts", "current", "imports", "reservations", "maps", "registrations", "streams"}) {
      EXPECT_EQ(fake_cuda_alive(kind), 0) << kind;
    }
  }

  // Waits until the server has so many regions.
  void WaitForRegions(size_t count) {
    WaitFor([&] { return server_.regions() == count; });
  }

  FakeLocalServer server_;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_CUDA_FIXTURE_H_
