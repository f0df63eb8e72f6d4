// The C++ client with a fake server, and a fake driver of GPUs.
#ifndef FLASHCORE_TESTS_CLIENT_CPP_DEVICE_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_CPP_DEVICE_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/synchronization/notification.h"
#include "flashcore/client.h"
#include "gtest/gtest.h"
#include "tests/client/cuda_fixture.h"

namespace flashcore {

// A status to come, of a callback.
struct Outcome {
  absl::Notification done;
  absl::Status status;
  AttendResult result;

  Client::AttendCallback Callback() {
    return [this](absl::Status given, AttendResult answer) {
      status = std::move(given);
      result = std::move(answer);
      done.Notify();
    };
  }
  const absl::Status& Wait() {
    done.WaitForNotification();
    return status;
  }
};

class CppDeviceTest : public FakeCudaTest {
 protected:
  static constexpr size_t kRowBytes = 16;  // of Q and of O
  static constexpr int kMaxRequests = 200;

  CppDeviceTest() {
    ClientOptions options;
    options.timeout = absl::Minutes(10);
    options.retry.max_attempts = 2;
    options.retry.initial_backoff = absl::Milliseconds(1);
    client_ = Client::Create(server_.target(), options).value();
  }

  ~CppDeviceTest() override {
    // The thread that removed the counters may still have their context.
    WaitFor([] { return fake_cuda_alive("current") == 0; });
  }

  // Waits until its counters are gone, while their context is there: a thread of the library may
  // have the last reference.
  void Close() {
    client_.reset();
    WaitFor([] { return fake_cuda_alive("registrations") == 0; });
  }

  DeviceMemory Allocate(size_t bytes = 2 * kMaxRequests * kRowBytes) {
    return client_->AllocateDeviceMemory(bytes).value();
  }

  // Request number i has a row of Q in `memory`, which the server copies to its row of O.
  static AttendRequest Request(const DeviceMemory& memory, int i) {
    AttendRequest request;
    request.spans = {{1, 0}};
    request.num_heads = request.num_kv_heads = 1;
    request.head_dim = kRowBytes / 2;
    request.query = {Row(memory, 2 * i), kRowBytes};
    request.output = {Row(memory, 2 * i + 1), kRowBytes};
    return request;
  }
  static uint64_t& Query(const DeviceMemory& memory, int i) { return Number(memory, 2 * i); }
  static uint64_t& Output(const DeviceMemory& memory, int i) { return Number(memory, 2 * i + 1); }

  std::unique_ptr<Client> client_;

 private:
  static std::byte* Row(const DeviceMemory& memory, int row) {
    return memory.address() + static_cast<size_t>(row) * kRowBytes;
  }
  static uint64_t& Number(const DeviceMemory& memory, int row) {
    return *reinterpret_cast<uint64_t*>(Row(memory, row));
  }
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_CPP_DEVICE_FIXTURE_H_
