// The C interface with a fake server, and a fake driver of GPUs.
#ifndef FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_

#include <sched.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "flashcore/c.h"
#include "gtest/gtest.h"
#include "tests/client/fake_cuda/fake_cuda.h"
#include "tests/client/fake_local_server.h"

namespace flashcore {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kTimeout = 60 * kSecond;

enum : int {  // of gRPC
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

// Looks at a state that another thread changes, until it is so.
template <typename Condition>
void WaitFor(const Condition& condition) {
  while (!condition()) sched_yield();
}

class CDeviceTest : public ::testing::Test {
 protected:
  CDeviceTest() { fake_cuda_reset(); }
  ~CDeviceTest() override {
    Close();
    for (const char* kind :
         {"contexts", "current", "imports", "reservations", "maps", "registrations", "streams"}) {
      EXPECT_EQ(fake_cuda_alive(kind), 0) << kind;
    }
  }

  void Connect(uint32_t slots = 64) {
    const flashcore_options options = {slots, 0, kTimeout, 0};
    ASSERT_EQ(flashcore_connect(server_.target().c_str(), "test", &options, &client_), FLASHCORE_OK)
        << flashcore_last_error();
  }
  void Close() { flashcore_close(std::exchange(client_, nullptr)); }

  int Allocate(uint64_t bytes, flashcore_device_memory* memory) {
    return flashcore_allocate_device_memory(client_, bytes, nullptr, kTimeout, memory);
  }
  // Waits until the server has so many regions: the ring's is one.
  void WaitForRegions(size_t count) {
    WaitFor([&] { return server_.regions() == count; });
  }

  FakeLocalServer server_;
  flashcore_client* client_ = nullptr;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_
