// Memory of a GPU in the C++ client.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashcore/error_info.h"
#include "gmock/gmock.h"
#include "tests/client/cpp_device_fixture.h"
#include "tests/client/fake_server.h"
#include "tests/client/request_fixture.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

static_assert(!std::is_copy_constructible_v<DeviceMemory> &&
              !std::is_copy_assignable_v<DeviceMemory>);

TEST_F(CppDeviceTest, GivesMemoryOfTheServersGpu) {
  v1::LocalAllocateDeviceMemory asked;
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_allocate_device_memory()) asked = request.allocate_device_memory();
    return false;
  };
  {
    const absl::StatusOr<DeviceMemory> memory = client_->AllocateDeviceMemory(100, "cuda:0");
    ASSERT_EQ(memory.status(), absl::OkStatus());
    EXPECT_EQ(asked.bytes(), 100u);
    EXPECT_EQ(asked.device_id(), "cuda:0");
    EXPECT_EQ(memory->bytes(), size_t{FAKE_CUDA_GRANULARITY}) << "all that the server gave";
    EXPECT_EQ(memory->ordinal(), 0);
    EXPECT_EQ(memory->device_uuid(), "GPU-66616b65-2047-5055-206e-6f2e20303030");
    EXPECT_TRUE(memory->registered());
    const std::string content(reinterpret_cast<const char*>(memory->address()), memory->bytes());
    EXPECT_EQ(content, std::string(memory->bytes(), '\0'));
    EXPECT_EQ(server_.regions(), 1u);
  }
  EXPECT_EQ(fake_cuda_alive("maps"), 0);
  WaitForRegions(0);
}

TEST_F(CppDeviceTest, MemoryMovesAndGoesWithItsLastOwner) {
  DeviceMemory first = Allocate();
  DeviceMemory second = Allocate();
  std::byte* const address = second.address();
  EXPECT_EQ(fake_cuda_alive("maps"), 2);
  first = std::move(second);
  EXPECT_EQ(fake_cuda_alive("maps"), 1);
  EXPECT_EQ(first.address(), address);
  WaitForRegions(1);
  client_.reset();
  DeviceMemory third = std::move(first);
  EXPECT_TRUE(third.registered()) << "it keeps the connection";
  std::memset(third.address(), 1, third.bytes());
}

TEST_F(CppDeviceTest, RefusalsAreTold) {
  v1::Status refusal;
  std::atomic<int> asked{0};
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (!request.has_allocate_device_memory()) return false;
    ++asked;
    *reply->mutable_status() = refusal;
    return true;
  };
  refusal.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  refusal.set_message("device_tensor_bytes");
  EXPECT_EQ(client_->AllocateDeviceMemory(1).status(),
            absl::ResourceExhaustedError("device_tensor_bytes"));
  EXPECT_EQ(asked, 1);
  const absl::Status nothing = client_->AllocateDeviceMemory(0).status();
  EXPECT_EQ(nothing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(nothing.message(), HasSubstr("bytes: 0"));
  EXPECT_EQ(asked, 1);
}

TEST_F(CppDeviceTest, ThereIsNoneOverGrpc) {
  const FakeServer grpc_server;
  const auto over_grpc = Client::Create(grpc_server.target()).value();
  const absl::Status status = over_grpc->AllocateDeviceMemory(1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("local:"));
  const DeviceMemory memory = Allocate();
  Outcome outcome;
  over_grpc->AttendOnCudaStream(Request(memory, 0), nullptr, outcome.Callback());
  EXPECT_EQ(outcome.Wait().code(), absl::StatusCode::kUnimplemented);
  const absl::Status attended = over_grpc->Attend(Request(memory, 0), nullptr);
  EXPECT_EQ(attended.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(attended.message(), HasSubstr("query: on a GPU"));
}

TEST_F(CppDeviceTest, TensorsStayThereInEveryKindOfRequest) {
  std::vector<v1::AttendRequest> sent;
  server_.on_attend = [&](const v1::AttendRequest& request) {
    sent.push_back(request);
    return v1::Status();
  };
  const DeviceMemory memory = Allocate();
  for (int i = 0; i < 3; ++i) Query(memory, i) = 10 + static_cast<uint64_t>(i);
  EXPECT_EQ(client_->Attend(Request(memory, 0), nullptr), absl::OkStatus());
  Outcome outcome;
  client_->AttendAsync(Request(memory, 1), outcome.Callback());
  EXPECT_EQ(outcome.Wait(), absl::OkStatus());
  const auto stream = client_->OpenStream();
  AttendRequest request = Request(memory, 2);
  request.request_id = "2";
  EXPECT_EQ(stream->Send(request), absl::OkStatus());
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  ASSERT_EQ(sent.size(), 3u);
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(sent[i].query_range().offset(), 2 * i * kRowBytes);
    EXPECT_EQ(sent[i].output_range().offset(), (2 * i + 1) * kRowBytes);
    EXPECT_EQ(sent[i].query_range().region_id(), sent[0].output_range().region_id());
    EXPECT_EQ(Output(memory, static_cast<int>(i)), 10 + i);
  }
}

TEST_F(CppDeviceTest, HostMemoryMayBeBesideIt) {
  const DeviceMemory memory = Allocate();
  RequestFixture r;
  std::memcpy(memory.address(), r.query.data(), r.query.size());
  r.request.query = {memory.address(), r.query.size()};
  EXPECT_EQ(client_->Attend(r.request, nullptr), absl::OkStatus());
  EXPECT_EQ(r.output, r.query);
}

TEST_F(CppDeviceTest, ATensorThatIsNotWhollyInItIsRefused) {
  const DeviceMemory memory = Allocate();
  const auto other = Client::Create(server_.target()).value();
  const DeviceMemory of_other = other->AllocateDeviceMemory(1).value();
  const auto refused = [&](std::byte* data, const std::string& why) {
    AttendRequest request = Request(memory, 0);
    request.query = {data, kRowBytes};
    Outcome outcome;
    client_->AttendAsync(request, outcome.Callback());
    for (const absl::Status& status : {client_->Attend(request, nullptr), outcome.Wait()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(status.message(), HasSubstr(why));
    }
    request = Request(memory, 0);
    request.output = {data, kRowBytes};
    EXPECT_THAT(client_->Attend(request, nullptr).message(), HasSubstr("output: "));
  };
  refused(memory.address() + 8, "query: 16 bytes at offset 8 of DeviceMemory");
  refused(memory.address() + memory.bytes() - 8, "of 65536 bytes; want all of them in it");
  refused(of_other.address(), "query: on a GPU");
  fake_cuda_manage(1);  // the host can copy it
  AttendRequest request = Request(memory, 0);
  request.query = {of_other.address(), kRowBytes};
  EXPECT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
}

TEST_F(CppDeviceTest, RowsAreAppendedFromTheHostAlone) {
  server_.on_call = [](const v1::LocalCall&, std::string* response) {
    v1::CreateSequenceResponse created;
    created.set_sequence_id("0123456789abcdef");
    *response = created.SerializeAsString();
    return v1::Status();
  };
  const DeviceMemory memory = Allocate();
  const auto sequence = client_->CreateSequence({1, 1, kRowBytes / 2});
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  const std::vector<std::byte> host(kRowBytes);
  const absl::Span<const std::byte> on_gpu(memory.address(), kRowBytes);
  EXPECT_THAT(sequence->Append(0, on_gpu, host, Layout::kNHD).status().message(),
              HasSubstr("key: on a GPU"));
  EXPECT_THAT(sequence->Append(0, host, on_gpu, Layout::kNHD).status().message(),
              HasSubstr("value: on a GPU"));
}

TEST_F(CppDeviceTest, MemoryOfAConnectionThatEndedIsLost) {
  DeviceMemory memory = Allocate();
  const AttendRequest request = Request(memory, 0);
  server_.Stop();
  WaitFor([&] { return !memory.registered(); });
  std::memset(memory.address(), 1, memory.bytes());  // still mapped
  Outcome without_server;
  client_->AttendAsync(request, without_server.Callback());
  EXPECT_EQ(without_server.Wait().code(), absl::StatusCode::kUnavailable);
  server_.Start();
  const auto expect_lost = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(GetErrorInfo(status).reason, "REGION_LOST");
    EXPECT_THAT(status.message(), HasSubstr("query: in DeviceMemory of a connection that has"));
  };
  expect_lost(client_->Attend(request, nullptr));
  Outcome async;
  client_->AttendAsync(request, async.Callback());
  expect_lost(async.Wait());
  EXPECT_FALSE(memory.registered());
  RequestFixture host;
  EXPECT_EQ(client_->Attend(host.request, nullptr), absl::OkStatus());
  memory = Allocate();
  EXPECT_EQ(client_->Attend(Request(memory, 0), nullptr), absl::OkStatus());
}

TEST_F(CppDeviceTest, AChildThatWasForkedIsRefusedAndLeavesIt) {
  DeviceMemory memory = Allocate();
  const pid_t child = fork();
  if (child == 0) {
    Outcome outcome;
    client_->AttendOnCudaStream(Request(memory, 0), nullptr, outcome.Callback());
    const bool refused =
        client_->AllocateDeviceMemory(1).status().code() == absl::StatusCode::kFailedPrecondition &&
        outcome.Wait().code() == absl::StatusCode::kFailedPrecondition && !memory.registered();
    { const DeviceMemory dropped = std::move(memory); }
    _exit(refused ? fake_cuda_alive("maps") - 1 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(memory.registered());
  EXPECT_EQ(client_->Attend(Request(memory, 0), nullptr), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore
