// How often the bytes of a tensor are copied, and when their memory comes back.
#include <algorithm>
#include <future>
#include <string>
#include <vector>

#include "flashcore/client.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/byte_buffer.h"
#include "gtest/gtest.h"
#include "tests/transport/byte_path_fixture.h"
#include "tests/transport/counted_memory.h"

namespace flashcore::server {
namespace {

using ::flashcore::testing::CopiedBytes;
using ::flashcore::testing::CopyWatch;
using testing::BlockDevice;
using testing::StagingBlock;

constexpr uint32_t kRows = 512;
constexpr size_t kSmallBytes = 1024;  // what may be copied beside tensors: small fields, headers

class CopiesTest : public testing::BytePathTest {
 protected:
  static constexpr size_t kInputBytes = 3 * kRows * kTokenBytes;
  static constexpr size_t kOutputBytes = kRows * kTokenBytes;
  static constexpr size_t kLseBytes = kRows * kHeads * sizeof(float);
};

// As gRPC's: slices that point into `bytes`, of a frame's size.
grpc::ByteBuffer InFrames(const std::string& bytes) {
  constexpr size_t kFrameBytes = 16384 - 9;
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += kFrameBytes) {
    slices.emplace_back(bytes.data() + begin, std::min(kFrameBytes, bytes.size() - begin),
                        grpc::Slice::STATIC_SLICE);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

TEST_F(CopiesTest, OneFromTheMessageToStagingMemoryAndNoneToTheReply) {
  const std::string bytes = Inline(kRows).SerializeAsString();
  grpc::ByteBuffer message = InFrames(bytes);
  const CopyWatch request(bytes.data(), bytes.size());
  const CopyWatch staging(block_.data(), StagingBlock::kBytes);
  Served exchange(this, &message);
  exchange.Receive();
  EXPECT_EQ(staging.copied_in(), kInputBytes);
  EXPECT_GE(request.copied_out(), kInputBytes);
  EXPECT_LT(request.copied_out(), kInputBytes + kSmallBytes);

  exchange.Run();
  const void* output = exchange.operation().tensors.output();
  const void* lse = exchange.operation().tensors.lse();
  grpc::ByteBuffer reply = exchange.Encode();
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(reply.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 4u);
  EXPECT_EQ(slices[1].begin(), output);
  EXPECT_EQ(slices[1].size(), kOutputBytes);
  EXPECT_EQ(slices[3].begin(), lse);
  EXPECT_EQ(slices[3].size(), kLseBytes);
  EXPECT_EQ(staging.copied_in(), kInputBytes);
  EXPECT_EQ(staging.copied_out(), 0u);

  EXPECT_GE(StagingInUse(), kOutputBytes + kLseBytes);
  reply.Clear();
  EXPECT_GE(StagingInUse(), kOutputBytes + kLseBytes);  // `slices` still point at it
  slices.clear();
  EXPECT_EQ(StagingInUse(), 0u);
}

// Client, gRPC and server in one process: every copy of the way there and back.
TEST_F(CopiesTest, OfAWholeRpc) {
  auto client = Client::Create(server_->addresses()[0]);
  ASSERT_TRUE(client.ok());
  const std::string inputs(kInputBytes, 'i');
  std::vector<std::byte> output(kOutputBytes);
  std::vector<float> lse(kLseBytes / sizeof(float));
  flashcore::AttendRequest request;
  request.spans = {{kRows, kRows}};
  request.num_heads = request.num_kv_heads = kHeads;
  request.head_dim = kHeadDim;
  const auto* data = reinterpret_cast<const std::byte*>(inputs.data());
  request.query = {data, kOutputBytes};
  request.key = {data + kOutputBytes, kOutputBytes};
  request.value = {data + 2 * kOutputBytes, kOutputBytes};
  request.output = absl::MakeSpan(output);
  request.lse = absl::MakeSpan(lse);
  request.request_id = "r";
  const auto stream = (*client)->OpenStream();
  const auto attend = [&](bool streamed) {
    if (!streamed) return (*client)->Attend(request, nullptr);
    std::promise<absl::Status> done;
    const absl::Status sent =
        stream->Send(request, [&](const absl::Status& status, const flashcore::AttendResult&) {
          done.set_value(status);
        });
    return sent.ok() ? done.get_future().get() : sent;
  };

  for (const bool streamed : {false, true}) {
    ASSERT_EQ(attend(streamed), absl::OkStatus());  // connects
    ASSERT_TRUE(AllStagingReturns());
    output.assign(kOutputBytes, std::byte{0});

    const CopyWatch staging(block_.data(), StagingBlock::kBytes);
    const CopyWatch callers_inputs(inputs.data(), inputs.size());
    const CopyWatch callers_output(output.data(), output.size());
    const size_t copied_before = CopiedBytes();
    ASSERT_EQ(attend(streamed), absl::OkStatus());
    EXPECT_TRUE(AllStagingReturns());
    const size_t copied = CopiedBytes() - copied_before;

    EXPECT_EQ(staging.copied_in(), kInputBytes);
    EXPECT_EQ(staging.copied_out(), 0u);
    // A unary call sends them from where they lie; a stream queues a copy of its request.
    const size_t queued = streamed ? kInputBytes : 0;
    EXPECT_EQ(callers_inputs.copied_out(), queued);
    EXPECT_EQ(callers_output.copied_in(), kOutputBytes);
    const size_t tensors = queued + kInputBytes + kOutputBytes + kLseBytes;
    EXPECT_GE(copied, tensors) << streamed;
    EXPECT_LT(copied, tensors + tensors / 50) << streamed;  // gRPC copies only small slices
    EXPECT_EQ(output, std::vector<std::byte>(kOutputBytes, std::byte{BlockDevice::kOutputByte}));
  }
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

TEST_F(CopiesTest, AReplyWhoseClientHasGoneGivesItsMemoryBack) {
  auto channel = grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials());
  auto stub = v1::AttentionService::NewStub(channel);
  grpc::ClientContext context;
  device_.SetOpen(false);
  auto call = std::async(std::launch::async, [&] {
    v1::AttendResponse response;
    return stub->Attend(&context, Inline(kRows), &response);
  });
  device_.WaitUntilEntered(1);
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::CANCELLED);
  stub.reset();
  channel.reset();  // and its connection
  device_.SetOpen(true);
  EXPECT_TRUE(AllStagingReturns());
}

}  // namespace
}  // namespace flashcore::server
