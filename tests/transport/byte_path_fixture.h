// A server in this process whose staging memory is one known block, and requests of the mission's
// size. FP16, 8 heads, head_dim 64.
#ifndef FLASHCORE_TESTS_TRANSPORT_BYTE_PATH_FIXTURE_H_
#define FLASHCORE_TESTS_TRANSPORT_BYTE_PATH_FIXTURE_H_

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "server/transport/grpc/adapters.h"
#include "server/transport/rpc/exchange.h"
#include "server/transport/rpc/message.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server::testing {

// Staging memory from one block, handed out once from front to back. Owned by the test.
struct StagingBlock {
  static constexpr size_t kBytes = size_t{64} << 20;

  std::byte* data() { return memory.data(); }

  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  size_t used = 0;
};

// Answers kOutputByte throughout. Owns neither the block nor the control, whose gate it waits at.
class BlockDevice final : public HeapDevice {
 public:
  static constexpr int kOutputByte = 0x5a;
  static constexpr size_t kKvMemoryBytes = size_t{32} << 20;

  BlockDevice(StagingBlock* block, FakeDeviceControl* control)
      : HeapDevice({"fake", /*lanes=*/1, kKvMemoryBytes}), block_(block), control_(control) {}

  StagingPool::Allocator staging_allocator() override {
    return {[this](size_t bytes) -> void* {
              if (bytes > StagingBlock::kBytes - block_->used) return nullptr;
              return block_->data() + std::exchange(block_->used, block_->used + bytes);
            },
            [](void*) {}};
  }

  absl::Status Dispatch(int /*lane*/, const Launch& launch) override {
    WritePages(launch);
    for (AttendOperation* operation : launch.operations) {
      if (operation->tensors.result_bytes() == 0) continue;
      std::memset(operation->tensors.output(), kOutputByte, operation->tensors.result_bytes());
    }
    MutexLock lock(&control_->mutex);
    ++control_->entered;
    control_->changed.NotifyAll();
    return absl::OkStatus();
  }
  absl::Status Complete(int /*lane*/) override {
    MutexLock lock(&control_->mutex);
    while (!control_->open) control_->changed.Wait(&control_->mutex);
    return absl::OkStatus();
  }

 private:
  StagingBlock* const block_;
  FakeDeviceControl* const control_;
};

class BytePathTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kHeads = 8;
  static constexpr uint32_t kHeadDim = 64;
  static constexpr size_t kTokenBytes = kHeads * kHeadDim * 2;  // a row of all heads

  void SetUp() override {
    Server::Options options = ServerOptions();
    options.max_message_bytes = 8 << 20;
    options.self_check.interval = std::chrono::hours(1);  // it allocates and copies
    metrics_ = std::make_unique<Metrics>(FakeMetricsOptions(Server::Methods(options)));
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::make_unique<BlockDevice>(&block_, &device_));
    Engine::Options engine;
    engine.staging_memory_bytes = StagingBlock::kBytes;
    engine.sequences.superblock_bytes = size_t{256} << 10;
    fleet_ = std::make_unique<Fleet>(engine, std::move(devices), &clock_, metrics_.get());
    context_.reset(new RpcContext{metrics_.get(), &clock_, Authenticator({}, metrics_.get()),
                                  &client_connections_, MakeGrpcAlarm});
    auto server = Server::Start(options, fleet_.get(), metrics_.get());
    ASSERT_EQ(server.status(), absl::OkStatus());
    server_ = *std::move(server);
  }
  void TearDown() override {
    server_.reset();
    fleet_.reset();
  }

  // One span of `rows` query rows and as many of K/V, inline; with return_lse.
  static v1::AttendRequest Inline(uint32_t rows) {
    v1::AttendRequest request;
    request.set_request_id("a request of an ordinary length");
    v1::Span* span = request.add_spans();
    span->set_query_rows(rows);
    span->set_kv_rows(rows);
    request.set_dtype(v1::DTYPE_FLOAT16);
    request.set_num_heads(kHeads);
    request.set_num_kv_heads(kHeads);
    request.set_head_dim(kHeadDim);
    request.set_layout(v1::LAYOUT_NHD);
    request.set_return_lse(true);
    request.set_query(std::string(rows * kTokenBytes, 'q'));
    request.set_key(std::string(rows * kTokenBytes, 'k'));
    request.set_value(std::string(rows * kTokenBytes, 'v'));
    return request;
  }

  // The server's part of an Attend but for gRPC's: one message in, one out.
  class Served final : public Exchange {
   public:
    Served(BytePathTest* test, grpc::ByteBuffer* message)
        : Exchange({test->fleet_.get(), test->context_.get(),
                    test->metrics_->Rpc(v1::AttentionService::service_full_name(), "Attend")},
                   ToRequestMessage(message)) {
      scope_.Replying(absl::OkStatus());
    }
    ~Served() override { Record(); }

    void Receive() {
      bool well_formed = false;
      Exchange::Receive(
          ParseAttend(message_.view(), /*regions=*/nullptr, &operation_, &tensors_, &well_formed));
    }
    void Run() {
      Enqueue();
      done_.WaitForNotification();
    }
    grpc::ByteBuffer Encode() { return ToByteBuffer(EncodeReply(&operation_)); }
    AttendOperation& operation() { return operation_; }

   private:
    void Received(const absl::Status& status) override { ASSERT_EQ(status, absl::OkStatus()); }
    void Complete(const absl::Status& status) override {
      EXPECT_EQ(status, absl::OkStatus());
      done_.Notify();
    }

    absl::Notification done_;
  };

  grpc::ByteBuffer Serve(grpc::ByteBuffer* message) {
    Served exchange(this, message);
    exchange.Receive();
    exchange.Run();
    return exchange.Encode();
  }

  size_t StagingInUse() const { return fleet_->engines()[0]->staging().used_bytes(); }

  // gRPC lets go of a reply's memory a little after the client has it.
  bool AllStagingReturns() const {
    return WaitUntil([this] { return StagingInUse() == 0; });
  }

  StagingBlock block_;
  FakeDeviceControl device_;
  SteadyClock clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  ClientConnections client_connections_{/*limit=*/0};
  std::unique_ptr<RpcContext> context_;  // of Served
  std::unique_ptr<Server> server_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_BYTE_PATH_FIXTURE_H_
