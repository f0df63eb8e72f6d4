// Shared memory of the C++ client, with a local socket of a server in this process.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cpu_device.h"
#include "tests/base/test_seed.h"
#include "tests/engine/attend_job.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::kPage;

class SharedMemoryTest : public testing::LocalServerTest {
 protected:
  void SetUp() override {
    Server::Options options = LocalServerOptions();
    options.unix_sockets.mode = 0666;
    path_ = options.local_listen;
    CpuDevice::Options device;
    device.threads = 2;
    device.kv_memory_bytes = 16 << 20;
    Start(CpuDevice::Create(device, clock_).value(), {}, options);
    client_ = Client::Create("local:" + options.local_listen).value();
  }

  // A request of 2 query rows and 3 K/V rows, in `memory`, in this order with O and LSE behind
  // them.
  flashcore::AttendRequest RequestIn(std::byte* memory) {
    flashcore::AttendRequest request;
    request.spans = {{2, 3}};
    request.num_heads = 2;
    request.num_kv_heads = 1;
    request.head_dim = testing::kHeadDim;
    std::byte* at = memory;
    const auto take = [&at](size_t bytes) {
      std::byte* const tensor = at;
      at += (bytes + 63) / 64 * 64;
      return absl::MakeSpan(tensor, bytes);
    };
    const auto fill = [&](size_t bytes) {
      const auto from = testing::RandomTensor(bytes, kernels::DType::kFloat16, &random_);
      const absl::Span<std::byte> to = take(bytes);
      std::memcpy(to.data(), from.data(), bytes);
      return absl::MakeConstSpan(to);
    };
    request.query = fill(request.QueryBytes());
    request.key = fill(request.KvBytes());
    request.value = fill(request.KvBytes());
    request.output = take(request.QueryBytes());
    const absl::Span<std::byte> lse = take(request.LseElements() * sizeof(float));
    request.lse = {reinterpret_cast<float*>(lse.data()), request.LseElements()};
    return request;
  }
  [[nodiscard]] bool NothingIsShared() const {
    return testing::WaitUntil([&] {
      return metrics_->shared_memory_bytes.Value() == 0 &&
             metrics_->shared_memory_regions.Value() == 0;
    });
  }

  std::mt19937 random_{TestSeed()};
  std::unique_ptr<Client> client_;
};

// Takes the results of a request, which are then overwritten.
std::vector<std::byte> TakeResults(const flashcore::AttendRequest& request) {
  std::vector<std::byte> bits(request.output.begin(), request.output.end());
  const auto* const lse = reinterpret_cast<const std::byte*>(request.lse.data());
  bits.insert(bits.end(), lse, lse + request.lse.size() * sizeof(float));
  std::memset(request.output.data(), 0xff, request.output.size());
  std::memset(request.lse.data(), 0xff, request.lse.size() * sizeof(float));
  return bits;
}

TEST_F(SharedMemoryTest, ResultsAreThoseOfTensorsThatTravelToTheBit) {
  const auto memory = client_->CreateSharedMemory(2 * kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  flashcore::AttendRequest request = RequestIn((*memory)->data());
  AttendResult result;
  const auto over_grpc = Client::Create(server_->addresses()[0]).value();
  ASSERT_EQ(over_grpc->Attend(request, &result), absl::OkStatus()) << "knows no region";
  EXPECT_GT(result.request_bytes, request.QueryBytes());
  const std::vector<std::byte> want = TakeResults(request);

  ASSERT_EQ(client_->Attend(request, &result), absl::OkStatus());
  EXPECT_LT(result.request_bytes, 250u);
  EXPECT_LT(result.response_bytes, 100u);
  EXPECT_EQ(TakeResults(request), want);

  const auto stream = client_->OpenStream();
  request.request_id = "1";
  ASSERT_EQ(stream->Send(request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(TakeResults(request), want);
}

TEST_F(SharedMemoryTest, OneTensorStaysWhileOthersTravel) {
  const auto memory = client_->CreateSharedMemory(2 * kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  flashcore::AttendRequest request = RequestIn((*memory)->data());
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  const std::vector<std::byte> want = TakeResults(request);
  // Each in turn is elsewhere, or where the contract does not allow it.
  alignas(16) static std::byte elsewhere[kPage];
  for (absl::Span<const std::byte> flashcore::AttendRequest::*input :
       {&flashcore::AttendRequest::query, &flashcore::AttendRequest::key,
        &flashcore::AttendRequest::value}) {
    flashcore::AttendRequest moved = request;
    std::byte* const to = (*memory)->data() + kPage + 8;
    std::memcpy(to, (request.*input).data(), (request.*input).size());
    moved.*input = {to, (request.*input).size()};
    ASSERT_EQ(client_->Attend(moved, nullptr), absl::OkStatus());
    EXPECT_EQ(TakeResults(request), want);
  }
  request.output = {elsewhere, request.output.size()};
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  EXPECT_EQ(TakeResults(request), want);
  request.lse = {reinterpret_cast<float*>(elsewhere + kPage / 2), request.lse.size()};
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  EXPECT_EQ(TakeResults(request), want);
}

// The server cannot write there: the client copies O and LSE.
TEST_F(SharedMemoryTest, ResultsReachMemoryOfInputsOnly) {
  SharedMemoryOptions inputs_only;
  inputs_only.inputs_only = true;
  const auto memory = client_->CreateSharedMemory(2 * kPage, inputs_only);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  const flashcore::AttendRequest request = RequestIn((*memory)->data());
  const auto over_grpc = Client::Create(server_->addresses()[0]).value();
  ASSERT_EQ(over_grpc->Attend(request, nullptr), absl::OkStatus());
  const std::vector<std::byte> want = TakeResults(request);
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  EXPECT_EQ(TakeResults(request), want);
}

TEST_F(SharedMemoryTest, QuotasHold) {
  const absl::Status status = client_->CreateSharedMemory((64 << 20) + kPage).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(NothingIsShared());
  EXPECT_EQ(client_->CreateSharedMemory(32 << 20).status(), absl::OkStatus());
}

TEST_F(SharedMemoryTest, NotOverGrpc) {
  const auto over_grpc = Client::Create(server_->addresses()[0]).value();
  const absl::Status status = over_grpc->CreateSharedMemory(kPage).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("local:"));
  EXPECT_EQ(client_->CreateSharedMemory(0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SharedMemoryTest, TheClientKnowsWhenTheServerIsGone) {
  const auto memory = client_->CreateSharedMemory(kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  EXPECT_TRUE((*memory)->registered());
  server_.reset();
  EXPECT_TRUE(testing::WaitUntil([&] { return !(*memory)->registered(); }));
  EXPECT_TRUE(NothingIsShared());
}

TEST_F(SharedMemoryTest, AClientThatMadeRoomConnectsAndRegistersAgain) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  const auto memory = client_->CreateSharedMemory(40 << 20);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  const testing::Memfd file(30 << 20);
  std::string id;
  auto other = GreetedAs(1001);
  ASSERT_EQ(other->Register(file.fd(), file.bytes(), &id), absl::OkStatus());
  ASSERT_TRUE(testing::WaitUntil([&] { return !(*memory)->registered(); }));
  other.reset();
  ASSERT_TRUE(NothingIsShared());
  EXPECT_EQ(client_->Attend(RequestIn((*memory)->data()), nullptr), absl::OkStatus());
  EXPECT_TRUE((*memory)->registered());
}

size_t Descriptors() {
  const std::filesystem::directory_iterator folder("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

// Counts the mappings of the memory in question.
size_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("/memfd:") < line.size();
  return count;
}

TEST_F(SharedMemoryTest, NothingLeaks) {
  ASSERT_EQ(client_->CreateSharedMemory(kPage).status(), absl::OkStatus());
  const size_t descriptors = Descriptors();
  const size_t mappings = Mappings();
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(client_->CreateSharedMemory(kPage).status(), absl::OkStatus()) << i;
  }
  // The server's check of itself has some, now and then.
  EXPECT_TRUE(testing::WaitUntil([&] { return Descriptors() <= descriptors; }));
  EXPECT_TRUE(testing::WaitUntil([&] { return Mappings() <= mappings; }));
}

}  // namespace
}  // namespace flashcore::server
