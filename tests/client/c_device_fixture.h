// The C interface with a fake server, and a fake driver of GPUs.
#ifndef FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "flashcore/c.h"
#include "tests/client/cuda_fixture.h"

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

class CDeviceTest : public FakeCudaTest {
 protected:
  ~CDeviceTest() override { Close(); }

  void Connect(uint32_t slots = 64) {
    const flashcore_options options = {slots, 0, kTimeout, 0};
    ASSERT_EQ(flashcore_connect(server_.target().c_str(), "test", &options, &client_), FLASHCORE_OK)
        << flashcore_last_error();
  }
  void Close() { flashcore_close(std::exchange(client_, nullptr)); }

  int Allocate(uint64_t bytes, flashcore_device_memory* memory) {
    return flashcore_allocate_device_memory(client_, bytes, nullptr, kTimeout, memory);
  }

  flashcore_client* client_ = nullptr;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_C_DEVICE_FIXTURE_H_
