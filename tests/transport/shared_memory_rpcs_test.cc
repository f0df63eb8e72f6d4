// Shared memory through the gRPC server in this process, on a Unix socket: with the C++ client, and
// with the generated one for what that never sends.
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "server/device/cpu_device.h"
#include "tests/base/test_seed.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"
#include "tests/memory/test_segment.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using testing::FakeDevice;
using testing::FakeDeviceControl;
using ::testing::HasSubstr;
using testing::TestSegment;

constexpr size_t kPage = 4096;

// A RegisterMemory stream of a client that does as it likes.
class RawRegistration {
 public:
  RawRegistration(v1::AttentionService::Stub* stub, const std::string& name, uint64_t bytes,
                  bool read_only = false)
      : stream_(stub->RegisterMemory(&context_)) {
    v1::RegisterMemoryRequest request;
    request.set_name(name);
    request.set_bytes(bytes);
    request.set_read_only(read_only);
    stream_->Write(request);
  }
  ~RawRegistration() { context_.TryCancel(); }

  bool ReadChallenge() {
    v1::RegisterMemoryResponse response;
    const bool ok = stream_->Read(&response);
    challenge_ = response.challenge();
    return ok;
  }
  // Empty: the server refused.
  std::string Prove(std::byte* memory) {
    std::memcpy(memory, challenge_.data(), challenge_.size());
    v1::RegisterMemoryResponse response;
    if (!stream_->Write({}) || !stream_->Read(&response)) return "";
    return response.region_id();
  }
  grpc::Status Finish() {
    stream_->WritesDone();
    v1::RegisterMemoryResponse response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }

  const std::string& challenge() const { return challenge_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::RegisterMemoryRequest, v1::RegisterMemoryResponse>>
      stream_;
  std::string challenge_;
};

class SharedMemoryRpcsTest : public ::testing::Test {
 protected:
  void Start(std::unique_ptr<Device> device, bool allowed = true) {
    Server::Options options = testing::ServerOptions();
    options.listen.push_back(
        absl::StrCat("unix:", ::testing::TempDir(), "/flashcore-shm-", getpid()));
    options.shared_memory.allowed = allowed;
    options.shared_memory.total_bytes = 64 * kPage;
    options.shared_memory.client_regions = 3;
    metrics_ = std::make_unique<Metrics>(testing::FakeMetricsOptions(Server::Methods(options)));
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::move(device));
    fleet_ =
        std::make_unique<Fleet>(Engine::Options(), std::move(devices), &clock_, metrics_.get());
    server_ = Server::Start(options, fleet_.get(), metrics_.get()).value();
    client_ = Connect(1);
    stub_ = v1::AttentionService::NewStub(
        grpc::CreateChannel(server_->addresses()[1], grpc::InsecureChannelCredentials()));
  }
  void StartCpu() {
    CpuDevice::Options options;
    options.threads = 2;
    options.kv_memory_bytes = 16 << 20;
    Start(CpuDevice::Create(options, &clock_).value());
  }
  void StartFake() { Start(std::make_unique<FakeDevice>(&control_)); }
  void TearDown() override {
    control_.SetOpen(true);
    client_.reset();
    server_.reset();
    fleet_.reset();
  }

  std::unique_ptr<Client> Connect(size_t address) {
    return Client::Create(server_->addresses()[address]).value();
  }

  // Of 2 query rows and 3 K/V rows, in `memory`, in this order with O and LSE behind them.
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

  // The same for the generated client: query in the region, K and V in the message.
  static v1::AttendRequest RawRequest(const std::string& region_id, uint64_t offset) {
    v1::AttendRequest request = testing::StepRequest({""});
    request.clear_query();
    request.mutable_query_range()->set_region_id(region_id);
    request.mutable_query_range()->set_offset(offset);
    return request;
  }
  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response = nullptr) {
    grpc::ClientContext context;
    v1::AttendResponse ignored;
    return stub_->Attend(&context, request, response == nullptr ? &ignored : response);
  }

  void ExpectNothingShared() {
    EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->shared_memory_bytes.Value() == 0; }));
    EXPECT_EQ(metrics_->shared_memory_regions.Value(), 0);
  }

  FakeDeviceControl control_;
  SteadyClock clock_;
  std::mt19937 random_{TestSeed()};
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
};

std::vector<std::byte> ResultsOf(const flashcore::AttendRequest& request) {
  std::vector<std::byte> bits(request.output.begin(), request.output.end());
  const auto* const lse = reinterpret_cast<const std::byte*>(request.lse.data());
  bits.insert(bits.end(), lse, lse + request.lse.size() * sizeof(float));
  return bits;
}

// Creates a sequence and loads one chunk. Then attends to it.
struct Loaded {
  grpc::Status status;
  std::string output;
};
Loaded Load(v1::AttentionService::Stub* stub, v1::LoadSequenceRequest chunk) {
  v1::CreateSequenceResponse created;
  grpc::ClientContext create;
  stub->CreateSequence(&create, testing::CreateRequest(), &created);
  chunk.set_sequence_id(created.sequence_id());
  grpc::ClientContext load;
  v1::LoadSequenceResponse loaded;
  const auto writer = stub->LoadSequence(&load, &loaded);
  writer->Write(chunk);
  writer->WritesDone();
  Loaded result = {writer->Finish(), ""};
  v1::AttendRequest request = testing::StepRequest({created.sequence_id()});
  request.mutable_spans(0)->set_kv_rows(0);
  request.clear_key();
  request.clear_value();
  v1::AttendResponse response;
  grpc::ClientContext attend;
  stub->Attend(&attend, request, &response);
  result.output = response.output();
  return result;
}

TEST_F(SharedMemoryRpcsTest, LoadsChunksFromARegion) {
  StartCpu();
  TestSegment segment(2 * kPage);
  RawRegistration registration(stub_.get(), segment.name(), segment.bytes());
  ASSERT_TRUE(registration.ReadChallenge());
  const std::string id = registration.Prove(segment.data());
  v1::LoadSequenceRequest chunk;
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(3);
  const auto kv = testing::RandomTensor(6 * testing::kRowBytes, kernels::DType::kFloat16, &random_);
  std::memcpy(segment.data() + kPage, kv.data(), kv.size());
  const size_t half = kv.size() / 2;
  v1::LoadSequenceRequest in_message = chunk;
  in_message.set_key(kv.data(), half);
  in_message.set_value(kv.data() + half, half);
  chunk.mutable_key_range()->set_region_id(id);
  chunk.mutable_key_range()->set_offset(kPage);
  chunk.mutable_value_range()->set_region_id(id);
  chunk.mutable_value_range()->set_offset(kPage + half);
  const Loaded want = Load(stub_.get(), in_message), got = Load(stub_.get(), chunk);
  EXPECT_TRUE(got.status.ok()) << got.status.error_message();
  EXPECT_EQ(got.output, want.output);
  EXPECT_NE(got.output, std::string(testing::kRowBytes, '\0'));
  chunk.set_key(kv.data(), half);
  EXPECT_THAT(Load(stub_.get(), chunk).status.error_message(), HasSubstr("key_range is set"));
  chunk.clear_key();
  chunk.mutable_value_range()->set_offset(2 * kPage - half + 16);
  EXPECT_THAT(Load(stub_.get(), chunk).status.error_message(), HasSubstr("value_range.offset"));
}

TEST_F(SharedMemoryRpcsTest, ResultsAreThoseOfTensorsThatTravelToTheBit) {
  StartCpu();
  const auto memory = client_->CreateSharedMemory(2 * kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  flashcore::AttendRequest request = RequestIn((*memory)->data());
  AttendResult result;
  ASSERT_EQ(Connect(1)->Attend(request, &result), absl::OkStatus()) << "knows no region";
  EXPECT_GT(result.request_bytes, request.QueryBytes());
  const std::vector<std::byte> want = ResultsOf(request);

  std::memset(request.output.data(), 0xff, request.output.size());
  ASSERT_EQ(client_->Attend(request, &result), absl::OkStatus());
  EXPECT_LT(result.request_bytes, 250u);
  EXPECT_LT(result.response_bytes, 100u);
  EXPECT_EQ(ResultsOf(request), want);

  std::memset(request.output.data(), 0xff, request.output.size());
  const auto stream = client_->OpenStream();
  request.request_id = "1";
  ASSERT_EQ(stream->Send(request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(ResultsOf(request), want);
}

TEST_F(SharedMemoryRpcsTest, OneTensorStaysWhileOthersTravel) {
  StartCpu();
  const auto memory = client_->CreateSharedMemory(2 * kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  flashcore::AttendRequest request = RequestIn((*memory)->data());
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  const std::vector<std::byte> want = ResultsOf(request);
  // Each in turn is elsewhere, or where the contract does not allow it.
  alignas(16) static std::byte elsewhere[kPage];
  for (absl::Span<const std::byte> flashcore::AttendRequest::*input :
       {&flashcore::AttendRequest::query, &flashcore::AttendRequest::key,
        &flashcore::AttendRequest::value}) {
    flashcore::AttendRequest moved = request;
    std::byte* const to = (*memory)->data() + kPage + 8;
    std::memcpy(to, (request.*input).data(), (request.*input).size());
    moved.*input = {to, (request.*input).size()};
    std::memset(request.output.data(), 0xff, request.output.size());
    ASSERT_EQ(client_->Attend(moved, nullptr), absl::OkStatus());
    EXPECT_EQ(ResultsOf(request), want);
  }
  request.output = {elsewhere, request.output.size()};
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  EXPECT_EQ(ResultsOf(request), want);
  request.lse = {reinterpret_cast<float*>(elsewhere + kPage / 2), request.lse.size()};
  ASSERT_EQ(client_->Attend(request, nullptr), absl::OkStatus());
  EXPECT_EQ(ResultsOf(request), want);
}

TEST_F(SharedMemoryRpcsTest, InputsOnlyIsNeverWritten) {
  StartCpu();
  SharedMemoryOptions inputs_only;
  inputs_only.inputs_only = true;
  const auto memory = client_->CreateSharedMemory(2 * kPage, inputs_only);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  flashcore::AttendRequest request = RequestIn((*memory)->data());
  AttendResult result;
  ASSERT_EQ(client_->Attend(request, &result), absl::OkStatus());
  EXPECT_LT(result.request_bytes, 250u);
  EXPECT_GT(result.response_bytes, request.QueryBytes());

  TestSegment segment(kPage);
  RawRegistration raw(stub_.get(), segment.name(), kPage, /*read_only=*/true);
  ASSERT_TRUE(raw.ReadChallenge());
  const std::string id = raw.Prove(segment.data());
  v1::AttendRequest writing = RawRequest(id, 0);
  *writing.mutable_output_range() = writing.query_range();
  EXPECT_THAT(Attend(writing).error_message(), HasSubstr("output_range: the region is read_only"));
}

TEST_F(SharedMemoryRpcsTest, RangesAreChecked) {
  StartFake();
  TestSegment segment(kPage);
  RawRegistration raw(stub_.get(), segment.name(), kPage);
  ASSERT_TRUE(raw.ReadChallenge());
  const std::string id = raw.Prove(segment.data());
  ASSERT_EQ(id.size(), 16u);
  EXPECT_TRUE(Attend(RawRequest(id, kPage - testing::kRowBytes)).ok());
  for (const uint64_t offset : {uint64_t{8}, uint64_t{kPage}, ~uint64_t{15}, uint64_t{1} << 63,
                                uint64_t{kPage - testing::kRowBytes + 16}}) {
    const grpc::Status status = Attend(RawRequest(id, offset));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("query_range.offset: ", offset)));
  }
  for (const std::string& unknown : {std::string(), std::string(16, 'x'), id.substr(1)}) {
    EXPECT_EQ(Attend(RawRequest(unknown, 0)).error_code(), grpc::StatusCode::NOT_FOUND);
  }
  v1::AttendRequest twice = RawRequest(id, 0);
  twice.set_query("x");
  EXPECT_THAT(Attend(twice).error_message(), HasSubstr("but query_range is set"));
  v1::AttendRequest huge = RawRequest(id, 0);
  for (int i = 0; i < 1000; ++i) {
    *huge.add_spans() = huge.spans(0);
    huge.mutable_spans(i)->set_query_rows(~0u);
  }
  EXPECT_EQ(Attend(huge).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(SharedMemoryRpcsTest, OnlyWhoCanWriteTheSegmentRegistersIt) {
  StartFake();
  TestSegment segment(kPage);
  const auto code = [&](const std::string& name, uint64_t bytes) {
    return RawRegistration(stub_.get(), name, bytes).Finish().error_code();
  };
  EXPECT_EQ(code("no-slash", 16), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(code(segment.name(), kPage + 1), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(code("/flashcore-test-none", 16), grpc::StatusCode::NOT_FOUND);

  RawRegistration liar(stub_.get(), segment.name(), kPage);
  ASSERT_TRUE(liar.ReadChallenge());
  EXPECT_EQ(liar.challenge().size(), 16u);
  std::byte elsewhere[16];
  EXPECT_EQ(liar.Prove(elsewhere), "");
  EXPECT_EQ(liar.Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  ExpectNothingShared();
}

TEST_F(SharedMemoryRpcsTest, QuotasHold) {
  StartFake();
  EXPECT_EQ(client_->CreateSharedMemory(65 * kPage).status().code(),
            absl::StatusCode::kResourceExhausted);
  std::vector<std::unique_ptr<flashcore::SharedMemory>> regions;
  for (int i = 0; i < 3; ++i) regions.push_back(client_->CreateSharedMemory(kPage).value());
  EXPECT_THAT(client_->CreateSharedMemory(kPage).status().message(), HasSubstr("at most 3"));
  EXPECT_EQ(metrics_->shared_memory_bytes.Value(), 3 * kPage);
  regions.pop_back();
  EXPECT_EQ(client_->CreateSharedMemory(kPage).status(), absl::OkStatus());
}

TEST_F(SharedMemoryRpcsTest, NotOverTcp) {
  StartFake();
  EXPECT_EQ(Connect(0)->CreateSharedMemory(kPage).status().code(),
            absl::StatusCode::kUnimplemented);
  TestSegment segment(kPage);
  RawRegistration raw(stub_.get(), segment.name(), kPage);
  ASSERT_TRUE(raw.ReadChallenge());
  const v1::AttendRequest request = RawRequest(raw.Prove(segment.data()), 0);
  EXPECT_TRUE(Attend(request).ok());
  stub_ = v1::AttentionService::NewStub(
      grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
  EXPECT_EQ(Attend(request).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(SharedMemoryRpcsTest, NotUnlessAllowed) {
  Start(std::make_unique<FakeDevice>(&control_), /*allowed=*/false);
  const absl::Status status = client_->CreateSharedMemory(kPage).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("--allow_shared_memory"));
  EXPECT_THAT(Attend(RawRequest("x", 0)).error_message(), HasSubstr("--allow_shared_memory"));
}

// The request is on the device when its memory goes.
TEST_F(SharedMemoryRpcsTest, AFileThatShrinksFailsItsRequestsAndNothingElse) {
  StartFake();
  TestSegment segment(2 * kPage);
  RawRegistration raw(stub_.get(), segment.name(), 2 * kPage);
  ASSERT_TRUE(raw.ReadChallenge());
  v1::AttendRequest request = RawRequest(raw.Prove(segment.data()), kPage);
  *request.mutable_output_range() = request.query_range();
  control_.SetOpen(false);
  auto answer = std::async(std::launch::async, [&] { return Attend(request); });
  control_.WaitUntilEntered(1);
  segment.Resize(0);
  control_.SetOpen(true);
  EXPECT_EQ(answer.get().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  const grpc::Status later = Attend(request);
  EXPECT_EQ(later.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(later.error_message(), HasSubstr("region_id: the segment has become"));
  EXPECT_TRUE(Attend(testing::StepRequest({""})).ok());
}

// And grows back, again and again, under a real device's threads.
TEST_F(SharedMemoryRpcsTest, SurvivesAFileThatComesAndGoes) {
  StartCpu();
  for (int i = 0; i < 20; ++i) {
    TestSegment segment(32 * kPage);
    RawRegistration raw(stub_.get(), segment.name(), 32 * kPage);
    ASSERT_TRUE(raw.ReadChallenge());
    v1::AttendRequest request = RawRequest(raw.Prove(segment.data()), kPage);
    request.clear_key();
    request.clear_value();
    request.mutable_spans(0)->set_kv_rows(1000);
    *request.mutable_key_range() = *request.mutable_value_range() = request.query_range();
    *request.mutable_output_range() = request.query_range();
    auto resizing = std::async(std::launch::async, [&] {
      for (int k = 0; k < 50; ++k) {
        segment.Resize(k % 3 * kPage);
        segment.Resize(32 * kPage);
      }
      segment.Resize(0);
    });
    grpc::Status status;
    while ((status = Attend(request)).ok()) {
    }
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    resizing.get();
  }
}

TEST_F(SharedMemoryRpcsTest, UnregisteringLetsWhatIsInFlightFinish) {
  StartFake();
  TestSegment segment(kPage);
  RawRegistration raw(stub_.get(), segment.name(), kPage);
  ASSERT_TRUE(raw.ReadChallenge());
  v1::AttendRequest request = RawRequest(raw.Prove(segment.data()), 0);
  *request.mutable_output_range() = request.query_range();
  request.mutable_output_range()->set_offset(kPage / 2);
  control_.SetOpen(false);
  auto answer = std::async(std::launch::async, [&] { return Attend(request); });
  control_.WaitUntilEntered(1);
  EXPECT_TRUE(raw.Finish().ok());
  EXPECT_EQ(Attend(request).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(metrics_->shared_memory_bytes.Value(), kPage);
  control_.SetOpen(true);
  EXPECT_TRUE(answer.get().ok());
  EXPECT_EQ(std::memcmp(segment.data() + kPage / 2, segment.data(), testing::kRowBytes), 0);
  ExpectNothingShared();
}

TEST_F(SharedMemoryRpcsTest, ADrainEndsRegistrationsAndTheClientKnows) {
  StartFake();
  const auto memory = client_->CreateSharedMemory(kPage);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  EXPECT_TRUE((*memory)->registered());
  EXPECT_TRUE(server_->Drain(absl::FromChrono(testing::kLong)));
  EXPECT_TRUE(testing::WaitUntil([&] { return !(*memory)->registered(); }));
  ExpectNothingShared();
}

size_t Descriptors() {
  const std::filesystem::directory_iterator folder("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

// Of the memory in question.
size_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("/flashcore-") < line.size();
  return count;
}

TEST_F(SharedMemoryRpcsTest, NothingLeaks) {
  StartFake();
  ASSERT_EQ(client_->CreateSharedMemory(kPage).status(), absl::OkStatus());
  ExpectNothingShared();
  const size_t descriptors = Descriptors();
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(client_->CreateSharedMemory(kPage).status(), absl::OkStatus()) << i;
  }
  ExpectNothingShared();
  // The server's check of itself has some, now and then.
  EXPECT_TRUE(testing::WaitUntil([&] { return Descriptors() <= descriptors; }));
  EXPECT_EQ(Mappings(), 0u);
}

}  // namespace
}  // namespace flashcore::server
