// The gRPC server in this process, called through the generated client.
#include "server/transport/server.h"

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "server/base/socket.h"
#include "tests/device/device_setting.h"
#include "tests/transport/gated_server.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;

class ServerTest : public testing::GatedServerTest {
 protected:
  // A valid request of one span: 2 heads, 1 KV head, head_dim 32.
  static v1::AttendRequest ValidRequest(uint32_t query_rows = 1, uint32_t kv_rows = 2) {
    v1::AttendRequest request;
    request.set_request_id("r1");
    v1::Span* span = request.add_spans();
    span->set_query_rows(query_rows);
    span->set_kv_rows(kv_rows);
    request.set_dtype(v1::DTYPE_FLOAT16);
    request.set_num_heads(2);
    request.set_num_kv_heads(1);
    request.set_head_dim(32);
    request.set_layout(v1::LAYOUT_NHD);
    request.set_query(std::string(query_rows * 2 * 32 * 2, '\0'));
    request.set_key(std::string(kv_rows * 32 * 2, '\0'));
    request.set_value(std::string(kv_rows * 32 * 2, '\0'));
    return request;
  }
};

class ServerOnDeviceTest : public ServerTest,
                           public ::testing::WithParamInterface<testing::DeviceSetting> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_none(); !why.empty()) GTEST_SKIP() << why;
    Start(GetParam().make(size_t{16} << 20, 0, clock_));
  }
};

TEST_P(ServerOnDeviceTest, Attends) {
  v1::AttendRequest request = ValidRequest(1, 2);
  // Q is zero, so every K/V row weighs the same: O is the mean of V, LSE is log(2).
  auto set_value = [&](int element, float value) {
    const uint16_t half = kernels::FromFloat(kernels::DType::kFloat16, value);
    request.mutable_value()->replace(element * 2, 2, reinterpret_cast<const char*>(&half), 2);
  };
  for (int d = 0; d < 32; ++d) {
    set_value(d, 1.0f);
    set_value(32 + d, 4.0f);
  }
  request.set_return_lse(true);
  v1::AttendResponse response;
  const grpc::Status status = Attend(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.request_id(), "r1");
  EXPECT_FALSE(response.has_status());
  ASSERT_EQ(response.output().size(), request.query().size());
  for (int i = 0; i < 64; ++i) {
    uint16_t half;
    std::memcpy(&half, &response.output()[i * 2], 2);
    EXPECT_EQ(kernels::ToFloat(kernels::DType::kFloat16, half), 2.5f);
  }
  ASSERT_EQ(response.lse().size(), 2 * sizeof(float));
  for (int head = 0; head < 2; ++head) {
    float lse;
    std::memcpy(&lse, &response.lse()[head * 4], 4);
    EXPECT_NEAR(lse, std::log(2.0), 1e-6);
  }
  EXPECT_GT(response.timing().receive_ns(), 0u);
  EXPECT_GT(response.timing().kernel_ns(), 0u);
}

TEST_P(ServerOnDeviceTest, TellsWhatItIs) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.version(), "test");
  ASSERT_EQ(info.devices_size(), 1);
  EXPECT_EQ(info.devices(0).id(), engine_->device().info().id);
  EXPECT_GT(info.devices(0).memory_bytes(), 0u);
  std::map<v1::KvDType, int> kernels;
  for (const v1::KernelInfo& kernel : info.kernels()) {
    if (kernel.precision() == v1::PRECISION_16BIT) {
      ++kernels[kernel.kv_dtype()];
    } else {
      EXPECT_EQ(kernel.kv_dtype(), v1::KV_DTYPE_INT8);
    }
  }
  EXPECT_EQ(kernels[v1::KV_DTYPE_SAME_AS_QUERY], 10);
  const int of_8_bits = engine_->device().info().id == "cpu" ? 10 : 4;
  EXPECT_EQ(kernels[v1::KV_DTYPE_INT8], of_8_bits);
  EXPECT_EQ(kernels[v1::KV_DTYPE_FLOAT8_E4M3], of_8_bits);
  EXPECT_THAT(info.limits().head_dims(), ::testing::ElementsAre(32, 64, 96, 128, 256));
  EXPECT_EQ(info.limits().max_message_bytes(), 1u << 20);
  EXPECT_EQ(info.limits().max_connections(), 1024u);
  EXPECT_EQ(info.limits().max_connections_per_host(), 256u);
  EXPECT_EQ(info.limits().max_connections_per_client(), 256u);
  EXPECT_EQ(info.limits().max_connection_streams(), 256u);
}

INSTANTIATE_TEST_SUITE_P(Devices, ServerOnDeviceTest, ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

struct BadMessage {
  const char* name;
  std::function<void(v1::AttendRequest&)> spoil;
  grpc::StatusCode code;
  const char* message;
};

class ServerBadMessageTest : public ServerTest, public ::testing::WithParamInterface<BadMessage> {};

// The engine's own checks have their own test; these come before it, or must survive the way to it.
TEST_P(ServerBadMessageTest, IsRefusedAndTheServerGoesOn) {
  StartFake();
  v1::AttendRequest request = ValidRequest();
  GetParam().spoil(request);
  const grpc::Status status = Attend(request);
  EXPECT_EQ(status.error_code(), GetParam().code);
  EXPECT_THAT(status.error_message(), HasSubstr(GetParam().message));
  EXPECT_TRUE(Attend(ValidRequest()).ok());
  EXPECT_TRUE(AllStagingReturns());
}

INSTANTIATE_TEST_SUITE_P(
    All, ServerBadMessageTest,
    ::testing::Values(
        BadMessage{"NoDType", [](auto& r) { r.clear_dtype(); }, grpc::INVALID_ARGUMENT,
                   "dtype: 0 is not DTYPE_FLOAT16 (1)"},
        BadMessage{"UnknownDType", [](auto& r) { r.set_dtype(static_cast<v1::DType>(99)); },
                   grpc::INVALID_ARGUMENT, "dtype: 99"},
        BadMessage{"NoLayout", [](auto& r) { r.clear_layout(); }, grpc::INVALID_ARGUMENT,
                   "layout: 0"},
        BadMessage{"UnknownMask",
                   [](auto& r) { r.mutable_mask()->set_kind(static_cast<v1::Mask::Kind>(7)); },
                   grpc::INVALID_ARGUMENT, "mask.kind: 7"},
        BadMessage{"WindowOfCausal",
                   [](auto& r) {
                     r.mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL);
                     r.mutable_mask()->set_window_left(3);
                   },
                   grpc::INVALID_ARGUMENT, "only for KIND_SLIDING_WINDOW"},
        BadMessage{"NegativeWindow",
                   [](auto& r) {
                     r.mutable_mask()->set_kind(v1::Mask::KIND_SLIDING_WINDOW);
                     r.mutable_mask()->set_window_right(-2);
                   },
                   grpc::INVALID_ARGUMENT, "mask.window_right: -2 is negative"},
        BadMessage{"NanScale", [](auto& r) { r.set_softmax_scale(NAN); }, grpc::INVALID_ARGUMENT,
                   "softmax_scale: nan"},
        BadMessage{"UnknownPrecision",
                   [](auto& r) { r.set_precision(static_cast<v1::Precision>(3)); },
                   grpc::INVALID_ARGUMENT,
                   "precision: 3 is not PRECISION_16BIT (0), PRECISION_INT8_QK (1) or "
                   "PRECISION_INT8_QK_PV (2)"},
        BadMessage{"EmptyMessage", [](auto& r) { r.Clear(); }, grpc::INVALID_ARGUMENT, "dtype"},
        BadMessage{"ThousandsOfSpans",
                   [](auto& r) {
                     for (int i = 0; i < 5000; ++i) r.add_spans()->set_query_rows(1);
                   },
                   grpc::INVALID_ARGUMENT, "spans: 5001 came; 1..4096"},
        BadMessage{"AHundredThousandSpans",
                   [](auto& r) {
                     for (int i = 0; i < 200'000; ++i) r.add_spans();
                   },
                   grpc::INVALID_ARGUMENT, "more than the 262144 bytes allowed"},
        BadMessage{"OverTheMessageLimit", [](auto& r) { r.set_query(std::string(1 << 20, 'x')); },
                   grpc::RESOURCE_EXHAUSTED, "at most 1048576 are allowed"},
        BadMessage{"Timeout", [](auto& r) { r.set_timeout_ns(5); }, grpc::INVALID_ARGUMENT,
                   "timeout_ns: 5; only requests of AttendStream"},
        BadMessage{"Sequence", [](auto& r) { r.mutable_spans(0)->set_sequence_id("x"); },
                   grpc::INVALID_ARGUMENT, "spans[0].sequence_id: 1 bytes; an id has 16"}),
    [](const auto& param) { return param.param.name; });

TEST_F(ServerTest, BytesThatAreNoProtobufAreRefused) {
  StartFake();
  grpc::GenericStub generic(
      grpc::CreateChannel(server_->addresses()[0], grpc::InsecureChannelCredentials()));
  for (const std::string& bytes :
       {std::string("\xff\xff\xff", 3), std::string("garbage that is no message"),
        ValidRequest().SerializeAsString() + "\x6a",                // a tag, and nothing behind it
        ValidRequest().SerializeAsString() + std::string(1, '\0'),  // field number 0
        std::string("\x0a\x02\xc3\x28", 4)}) {                      // request_id is not UTF-8
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    std::promise<grpc::Status> ended;
    generic.UnaryCall(&context, "/flashcore.v1.AttentionService/Attend", {}, &request, &response,
                      [&](grpc::Status status) { ended.set_value(std::move(status)); });
    const grpc::Status status = ended.get_future().get();
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("message: "));
  }
}

TEST_F(ServerTest, AFullQueueRefusesAndADeadlineIsKept) {
  Engine::Options options;
  options.batcher.max_queue_requests = 1;
  clock_ = &fake_clock_;
  StartFake(options);
  gate_.SetOpen(false);
  const auto running = Send(ValidRequest());
  ASSERT_TRUE(WaitForArrived(1));
  auto expiring = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
    v1::AttendResponse response;
    return stub_->Attend(&context, ValidRequest(), &response);
  });
  ASSERT_TRUE(WaitForQueued(1));
  const grpc::Status refused = Attend(ValidRequest());  // the one place in the queue is taken
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("queue is full: 1"));
  EXPECT_EQ(testing::InfoOf(refused).reason(), "QUEUE_FULL");
  fake_clock_.Advance(std::chrono::hours(2));
  gate_.SetOpen(true);
  EXPECT_TRUE(running->status.get().ok());
  EXPECT_EQ(expiring.get().error_code(), grpc::DEADLINE_EXCEEDED);  // from the server
  EXPECT_TRUE(Attend(ValidRequest()).ok());
  // The expired request was never launched: one batch for each of the two that ran.
  EXPECT_THAT(fake_.BatchSizes(), ::testing::ElementsAre(1, 1));
}

TEST_F(ServerTest, ACancelledRequestIsNeverLaunched) {
  StartFake();
  // The server hears of it a little later than the client: the gate stays closed longer and longer,
  // until the server knew before the gate opened.
  for (std::chrono::milliseconds closed(10);; closed *= 2) {
    ASSERT_LT(closed, testing::kLong / 4);
    const size_t before = gate_.arrived();
    gate_.SetOpen(false);
    const auto running = Send(ValidRequest());
    ASSERT_TRUE(WaitForArrived(before + 1));
    const auto cancelled = Send(ValidRequest());
    ASSERT_TRUE(WaitForQueued(1));
    cancelled->context.TryCancel();
    EXPECT_EQ(cancelled->status.get().error_code(), grpc::CANCELLED);
    std::this_thread::sleep_for(closed);
    gate_.SetOpen(true);
    EXPECT_TRUE(running->status.get().ok());
    EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 0; }));
    if (gate_.arrived() == before + 1) break;
  }
}

TEST_P(ServerOnDeviceTest, AStreamAnswersEveryRequestById) {
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  constexpr int kRequests = 50;  // more than may be in flight
  std::thread writer([&] {
    for (int i = 0; i < kRequests; ++i) {
      v1::AttendRequest request = ValidRequest();
      request.set_request_id(std::to_string(i));
      if (i % 10 == 7) request.set_head_dim(48);
      EXPECT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  std::set<std::string> answered;
  v1::AttendResponse response;
  while (stream->Read(&response)) {
    EXPECT_TRUE(answered.insert(response.request_id()).second);
    const bool bad = std::stoi(response.request_id()) % 10 == 7;
    EXPECT_EQ(response.status().code(), bad ? grpc::INVALID_ARGUMENT : grpc::OK);
    EXPECT_EQ(response.output().empty(), bad);
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(answered.size(), size_t{kRequests});
}

TEST_F(ServerTest, AStreamRequestWithoutAnIdIsRefusedAlone) {
  StartFake();
  grpc::ClientContext context;
  auto stream = stub_->AttendStream(&context);
  v1::AttendRequest request = ValidRequest();
  request.clear_request_id();
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.status().code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(response.status().message(), HasSubstr("request_id: empty"));
  ASSERT_TRUE(stream->Write(ValidRequest()));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.has_status());
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServerTest, ACancelledStreamLeavesNothingBehind) {
  StartFake();
  gate_.SetOpen(false);
  {
    grpc::ClientContext context;
    auto stream = stub_->AttendStream(&context);
    for (int i = 0; i < 3; ++i) {
      v1::AttendRequest request = ValidRequest();
      request.set_request_id(std::to_string(i));
      ASSERT_TRUE(stream->Write(request));
    }
    ASSERT_TRUE(WaitForArrived(1));
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
  }
  gate_.SetOpen(true);
  EXPECT_TRUE(server_->Drain(absl::FromChrono(testing::kLong)));
  EXPECT_TRUE(AllStagingReturns());
}

TEST_F(ServerTest, ADrainAnswersWhatIsInFlightAndRefusesTheRest) {
  StartFake();
  gate_.SetOpen(false);
  grpc::ClientContext stream_context;
  auto stream = stub_->AttendStream(&stream_context);
  ASSERT_TRUE(stream->Write(ValidRequest()));
  ASSERT_TRUE(WaitForArrived(1));
  auto drained = std::async(std::launch::async,
                            [&] { return server_->Drain(absl::FromChrono(testing::kLong)); });
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->serving.Value() == 0; }));
  grpc::Status refused;
  do
    refused = [&] {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
      v1::AttendResponse response;
      return stub_->Attend(&context, ValidRequest(), &response);
    }();
  while (refused.error_code() == grpc::DEADLINE_EXCEEDED);  // the drain had not begun
  EXPECT_EQ(refused.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("the server drains"));
  gate_.SetOpen(true);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.has_status());
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::UNAVAILABLE);
  EXPECT_TRUE(drained.get());
}

TEST_F(ServerTest, ADrainThatRunsOutOfTimeSaysSo) {
  StartFake();
  gate_.SetOpen(false);
  const auto running = Send(ValidRequest());
  ASSERT_TRUE(WaitForArrived(1));
  EXPECT_FALSE(server_->Drain(absl::Milliseconds(20)));
  gate_.SetOpen(true);
  EXPECT_TRUE(running->status.get().ok());
}

// The socket of this process that listens on `address`.
int ListeningSocket(const std::string& address) {
  for (int socket = 3; socket < 1024; ++socket) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
      continue;
    }
    const SocketAddress local = LocalAddress(socket);
    if (absl::StrCat(HostOf(local), ":", PortOf(local)) == address) return socket;
  }
  return -1;
}

TEST_F(ServerTest, TellsWhenAListenerIsDead) {
  Server::Options options = testing::ServerOptions();
  std::promise<std::string> dead;
  options.on_dead = [&](const std::string& address, const absl::Status& why) {
    EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable) << why;
    dead.set_value(address);
  };
  StartFake();
  auto other = Server::Start(options, fleet_.get(), metrics_.get());
  ASSERT_TRUE(other.ok()) << other.status();
  std::future<std::string> found = dead.get_future();
  const int socket = ListeningSocket((*other)->addresses()[0]);
  ASSERT_GE(socket, 0);
  shutdown(socket, SHUT_RDWR);
  ASSERT_EQ(found.wait_for(testing::kLong), std::future_status::ready);
  EXPECT_EQ(found.get(), (*other)->addresses()[0]);
}

TEST_F(ServerTest, AnAddressInUseIsAnError) {
  StartFake();
  Server::Options options;
  options.listen = server_->addresses();
  options.max_message_bytes = 1 << 20;
  options.transport_memory_bytes = 64 << 20;
  options.max_stream_inflight = 1;
  const auto second = Server::Start(options, fleet_.get(), metrics_.get());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(options.listen[0]));
}

}  // namespace
}  // namespace flashcore::server
