// Bits over RPC do not depend on the company of a request. The batch histogram proves that it was
// alone the first time and in company the second time.
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/base/test_seed.h"
#include "tests/device/device_setting.h"
#include "tests/engine/attend_job.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

constexpr uint32_t kHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kDim = 64;
constexpr int kRequests = 24;

// The results of a request, as bits.
struct Bits {
  std::string output, lse;
  friend bool operator==(const Bits& a, const Bits& b) {
    return a.output == b.output && a.lse == b.lse;
  }
};
Bits BitsOf(const v1::AttendResponse& response) { return {response.output(), response.lse()}; }

class BatchingTest : public testing::GatedServerTest,
                     public ::testing::WithParamInterface<testing::DeviceSetting> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_none(); !why.empty()) GTEST_SKIP() << why;
    Engine::Options engine;
    engine.sequences.superblock_bytes = testing::kSuperblockBytes;
    Server::Options options = testing::ServerOptions();
    options.max_stream_inflight = 2 * kRequests;
    Start(GetParam().make(size_t{32} << 20, 0, clock_), engine, options);
    prefix_ = Create(SequenceShape());
    Load(prefix_, 700);  // more than one split of K/V
  }

  static v1::CreateSequenceRequest SequenceShape() {
    v1::CreateSequenceRequest request = testing::CreateRequest();
    request.set_num_kv_heads(kKvHeads);
    request.set_shared(true);  // with the clients that fork it
    request.set_head_dim(kDim);
    return request;
  }

  std::string Tensor(uint32_t rows, uint32_t heads) {
    const auto tensor =
        testing::RandomTensor(size_t{rows} * heads * kDim * 2, kernels::DType::kFloat16, &random_);
    return {reinterpret_cast<const char*>(tensor.data()), tensor.size()};
  }
  uint32_t Uniform(uint32_t least, uint32_t most) {
    return std::uniform_int_distribution<uint32_t>(least, most)(random_);
  }

  // Loads `rows` random rows.
  void Load(const std::string& id, uint32_t rows) {
    v1::LoadSequenceRequest chunk;
    chunk.set_sequence_id(id);
    chunk.set_layout(v1::LAYOUT_NHD);
    chunk.set_rows(rows);
    chunk.set_key(Tensor(rows, kKvHeads));
    chunk.set_value(Tensor(rows, kKvHeads));
    grpc::ClientContext context;
    v1::LoadSequenceResponse response;
    auto writer = stub_->LoadSequence(&context, &response);
    writer->Write(chunk);
    writer->WritesDone();
    ASSERT_TRUE(writer->Finish().ok());
  }
  static std::string ClientOf(size_t request) { return "client " + std::to_string(request % 5); }

  std::string Fork(const std::string& id, const std::string& client) {
    v1::ForkSequenceRequest request;
    request.set_sequence_id(id);
    v1::ForkSequenceResponse response;
    grpc::ClientContext context;
    if (!client.empty()) context.AddMetadata("flashcore-client", client);
    EXPECT_TRUE(stub_->ForkSequence(&context, request, &response).ok());
    return response.sequence_id();
  }

  // A request of one span: inline, over the shared prefix, or over a fork of it with rows to
  // append.
  v1::AttendRequest RandomRequest(int i) {
    v1::AttendRequest request;
    request.set_request_id(std::to_string(i));
    request.set_dtype(v1::DTYPE_FLOAT16);
    request.set_num_heads(kHeads);
    request.set_num_kv_heads(kKvHeads);
    request.set_head_dim(kDim);
    request.set_layout(v1::LAYOUT_NHD);
    request.set_return_lse(true);
    request.mutable_mask()->set_kind(i % 2 == 0 ? v1::Mask::KIND_CAUSAL : v1::Mask::KIND_NONE);
    v1::Span* span = request.add_spans();
    span->set_query_rows(Uniform(1, 8));
    const bool is_inline = i % 3 == 0;
    span->set_kv_rows(is_inline ? Uniform(8, 300) : i % 3 == 1 ? 0 : Uniform(1, 8));
    if (!is_inline) span->set_sequence_id(prefix_);
    request.set_query(Tensor(span->query_rows(), kHeads));
    request.set_key(Tensor(span->kv_rows(), kKvHeads));
    request.set_value(Tensor(span->kv_rows(), kKvHeads));
    return request;
  }

  // The requests with a new fork for each that appends. With `of_many_clients`, for each that only
  // reads, too, and each fork belongs to ClientOf its request.
  std::vector<v1::AttendRequest> OnNewForks(bool of_many_clients = false) {
    std::vector<v1::AttendRequest> requests = requests_;
    for (size_t i = 0; i < requests.size(); ++i) {
      v1::Span* span = requests[i].mutable_spans(0);
      if (span->sequence_id().empty() || (span->kv_rows() == 0 && !of_many_clients)) continue;
      span->set_sequence_id(Fork(prefix_, of_many_clients ? ClientOf(i) : ""));
      span->set_expected_length(700);
    }
    return requests;
  }

  // The count of the batch histogram.
  struct Launches {
    uint64_t count = 0;
    uint64_t requests = 0;
  };
  Launches launches() const {
    const auto histogram = metrics_->device(0).batch_requests.Collect().histogram;
    return {histogram.sample_count, static_cast<uint64_t>(histogram.sample_sum)};
  }
  void ExpectLaunches(const Launches& before, uint64_t count, uint64_t requests) const {
    const Launches now = launches();
    EXPECT_EQ(now.count - before.count, count);
    EXPECT_EQ(now.requests - before.requests, requests);
  }

  // One after the other.
  void AttendAlone() {
    const Launches before = launches();
    for (const v1::AttendRequest& request : OnNewForks()) {
      v1::AttendResponse response;
      const grpc::Status status = Attend(request, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      alone_.push_back(BitsOf(response));
    }
    ExpectLaunches(before, kRequests, kRequests);
  }

  // Closes the gate, and occupies every lane of the device with a launch in front of it.
  std::vector<std::unique_ptr<Call>> OccupyLanes() {
    gate_.SetOpen(false);
    std::vector<std::unique_ptr<Call>> calls;
    const size_t before = gate_.arrived();
    for (int lane = 0; lane < engine_->device().info().lanes; ++lane) {
      calls.push_back(Send(requests_[0]));
      EXPECT_TRUE(WaitForArrived(before + calls.size()));
    }
    return calls;
  }

  // All at once, in `want_launches` launches; each gets the bits that it got alone.
  void AttendInCompany(uint64_t want_launches) {
    // Requests on one sequence run in the order of their arrival. The clients' turns may be another
    // order, and the batch would leave some requests out.
    const std::vector<v1::AttendRequest> requests = OnNewForks(/*of_many_clients=*/true);
    const Launches before = launches();
    const auto occupied = OccupyLanes();
    std::vector<std::unique_ptr<Call>> calls;
    for (const v1::AttendRequest& request : requests) {
      calls.push_back(Send(request, ClientOf(calls.size())));
    }
    EXPECT_TRUE(WaitForQueued(kRequests));
    gate_.SetOpen(true);
    for (int i = 0; i < kRequests; ++i) {
      const grpc::Status status = calls[i]->status.get();
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_TRUE(BitsOf(calls[i]->response) == alone_[i]) << "request " << i;
    }
    for (const auto& call : occupied) EXPECT_TRUE(call->status.get().ok());
    ExpectLaunches(before, occupied.size() + want_launches, occupied.size() + kRequests);
  }

  std::mt19937 random_{TestSeed()};
  std::string prefix_;  // a sequence of 700 rows
  std::vector<v1::AttendRequest> requests_;
  std::vector<Bits> alone_;
};

INSTANTIATE_TEST_SUITE_P(Devices, BatchingTest, ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

TEST_P(BatchingTest, ManyClientsInOneLaunchGetTheBitsOfEachAlone) {
  for (int i = 0; i < kRequests; ++i) requests_.push_back(RandomRequest(i));
  AttendAlone();
  AttendInCompany(1);
}

TEST_P(BatchingTest, AStreamInOneLaunchGetsTheBitsOfEachAlone) {
  for (int i = 0; i < kRequests; ++i) requests_.push_back(RandomRequest(i));
  AttendAlone();
  const std::vector<v1::AttendRequest> requests = OnNewForks();
  const Launches before = launches();
  const auto occupied = OccupyLanes();
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  for (const v1::AttendRequest& request : requests) EXPECT_TRUE(stream->Write(request));
  stream->WritesDone();
  EXPECT_TRUE(WaitForQueued(kRequests));
  gate_.SetOpen(true);
  int answered = 0;
  v1::AttendResponse response;
  for (; stream->Read(&response); ++answered) {
    EXPECT_FALSE(response.has_status()) << response.status().message();
    const int i = std::stoi(response.request_id());
    EXPECT_TRUE(BitsOf(response) == alone_[i]) << "request " << i;
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered, kRequests);
  for (const auto& call : occupied) EXPECT_TRUE(call->status.get().ok());
  ExpectLaunches(before, occupied.size() + 1, occupied.size() + kRequests);
}

TEST_P(BatchingTest, OverInt8EachPrecisionHasALaunchOfItsOwn) {
  v1::CreateSequenceRequest shape = SequenceShape();
  shape.set_kv_dtype(v1::KV_DTYPE_INT8);
  prefix_ = Create(shape);
  Load(prefix_, 700);
  constexpr int kPrecisions = 3;
  for (int i = 0; i < kRequests; ++i) {
    requests_.push_back(RandomRequest(3 * i + 1 + i % 2));  // reads the sequence, or appends to it
    requests_.back().set_precision(static_cast<v1::Precision>(i % kPrecisions));
  }
  AttendAlone();
  AttendInCompany(kPrecisions);
}

}  // namespace
}  // namespace flashcore::server
