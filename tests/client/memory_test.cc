#include "client/cpp/memory.h"

#include <sys/mman.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace flashcore::client {
namespace {

TEST(BorrowedMemoryTest, WaitsUntilEverySliceIsDropped) {
  const std::vector<std::byte> memory(1000);
  auto borrowed = std::make_unique<BorrowedMemory>();
  grpc::Slice first = borrowed->Acquire(absl::MakeConstSpan(memory).first(600));
  grpc::Slice second = borrowed->Acquire(absl::MakeConstSpan(memory).last(400));
  EXPECT_EQ(static_cast<const void*>(second.begin()), memory.data() + 600);
  absl::Notification released;
  std::thread waiting([&] {
    borrowed.reset();
    released.Notify();
  });
  first = grpc::Slice();
  {
    const grpc::Slice copy = second;
    second = grpc::Slice();
    // Time in which a wait that is none would end.
    EXPECT_FALSE(released.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  }
  released.WaitForNotification();
  waiting.join();
}

// Inputs that are gone once Attend has released.
class UnmappedInputs {
 public:
  static constexpr size_t kRows = 16384;

  UnmappedInputs() {
    request.spans = {{kRows, kRows}};
    request.num_heads = request.num_kv_heads = 1;
    request.head_dim = 64;
    const size_t bytes = request.QueryBytes();
    memory_ = mmap(nullptr, 3 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto* inputs = static_cast<const std::byte*>(memory_);
    request.query = {inputs, bytes};
    request.key = {inputs + bytes, bytes};
    request.value = {inputs + 2 * bytes, bytes};
    output_.resize(bytes);
    request.output = absl::MakeSpan(output_);
  }
  ~UnmappedInputs() { munmap(memory_, 3 * request.QueryBytes()); }

  AttendRequest request;

 private:
  void* memory_ = nullptr;
  std::vector<std::byte> output_;
};

// Deadlines that pass at every stage of a request. If gRPC still wrote from the inputs, its write
// would fail and break the connection.
void SendWithShortDeadlines(int requests) {
  FakeServer server;  // mostly answers too late
  ClientOptions options;
  options.retry.max_attempts = 1;
  auto client = *Client::Create(server.target(), options);
  ASSERT_TRUE(client->WaitForConnected(absl::Now() + absl::Minutes(1)));
  int late = 0;
  for (int i = 0; i < requests; ++i) {
    UnmappedInputs inputs;
    CallOptions call;
    call.deadline = absl::Now() + absl::Microseconds(100 * (i % 50));
    const absl::Status status = client->Attend(inputs.request, nullptr, call);
    if (absl::IsDeadlineExceeded(status)) {
      ++late;
    } else {
      EXPECT_EQ(status, absl::OkStatus());
    }
  }
  EXPECT_GT(late, 0);
}

TEST(BorrowedMemoryTest, NothingIsSentFromACallersMemoryAfterTheDeadline) {
  SendWithShortDeadlines(50);
}

TEST(BorrowedMemoryStressTest, NothingIsSentFromACallersMemoryAfterTheDeadline) {
  SendWithShortDeadlines(500);
}

}  // namespace
}  // namespace flashcore::client
