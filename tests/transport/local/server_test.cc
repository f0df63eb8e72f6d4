// The local socket: what its requests do.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/wire/frames.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using testing::ClientRing;
using ::testing::HasSubstr;
using testing::kPage;
using testing::kRowBytes;
using testing::LocalClient;
using testing::LocalServerTest;
using testing::Memfd;
using testing::StepRequest;

class LocalTest : public LocalServerTest {
 protected:
  double Requests(const char* method) const { return GatedServerTest::Requests(method, "local"); }
  static absl::Status GetInfo(LocalClient* client) {
    v1::GetServerInfoResponse info;
    return client->Call("GetServerInfo", v1::GetServerInfoRequest(), &info);
  }
  // Sends them at once, each with the client's next id. Returns the first one's.
  static uint64_t SendTo(LocalClient* client, std::vector<v1::LocalRequest> requests,
                         int file = -1) {
    std::string frames;
    for (v1::LocalRequest& request : requests) {
      request.set_id(client->NextId());
      frames += wire::Frame(request.SerializeAsString());
    }
    EXPECT_TRUE(client->SendBytes(frames, file));
    return requests.front().id();
  }
  // The next reply is that to the request `id`, 0: to any, with this status.
  static void ExpectReply(LocalClient* client, uint64_t id,
                          absl::StatusCode code = absl::StatusCode::kOk) {
    const auto reply = client->Receive();
    ASSERT_TRUE(reply.has_value());
    EXPECT_TRUE(id == 0 || reply->id() == id) << reply->id();
    EXPECT_EQ(reply->status().code(), static_cast<int>(code)) << reply->status().message();
  }
  // A request with tag 1 in the lane's ring that waits in the device until the gate opens.
  [[nodiscard]] bool SubmitAtGate(Lane* lane, const v1::AttendRequest& request) {
    gate_.SetOpen(false);
    lane->ring.Submit(1, request);
    return WaitForArrived(1);
  }
  [[nodiscard]] bool SubmitAtGate(Lane* lane) {
    return SubmitAtGate(lane, lane->Step(lane->Create()));
  }
  // With a fake clock, and room for so many connections of this user.
  void StartWithRoomFor(int connections) {
    clock_ = &fake_clock_;
    Server::Options options = LocalServerOptions();
    options.connections.max_per_host = connections;
    StartLocal(options);
  }
  [[nodiscard]] bool WaitForConnections(int count) {
    return testing::WaitUntil([&] { return metrics_->local_connections.Value() == count; });
  }
  std::future<bool> StartDrain() {
    return std::async(std::launch::async, [this] { return server_->Drain(absl::Seconds(60)); });
  }
};

TEST_F(LocalTest, AnswersThroughARing) {
  StartLocal();
  Lane lane(path_);
  const std::string id = lane.Create();
  std::memset(lane.memory.data() + Lane::kTensors, 0x11, kRowBytes);
  v1::AttendRequest request = lane.Step(id);
  request.set_request_id("step-1");
  v1::AttendResponse response;
  ASSERT_EQ(lane.Attend(request, &response), absl::OkStatus());
  EXPECT_EQ(response.request_id(), "step-1");
  EXPECT_EQ(response.sequence_lengths(0), 1);
  EXPECT_TRUE(response.output().empty());
  // The fake device copies Q to O.
  EXPECT_EQ(std::memcmp(lane.memory.data() + Lane::kTensors, lane.memory.data() + Lane::kOutputs,
                        kRowBytes),
            0);
  for (int i = 0; i < 40; ++i) ASSERT_EQ(lane.Attend(request, &response), absl::OkStatus());
  EXPECT_EQ(response.sequence_lengths(0), 41);
  EXPECT_TRUE(testing::WaitUntil([&] { return Requests("Attend") == 41; }));
}

TEST_F(LocalTest, TakesTensorsInSlots) {
  StartLocal();
  Lane lane(path_);
  v1::AttendRequest request = StepRequest({lane.Create()});
  request.set_return_lse(true);
  request.mutable_query()->assign(kRowBytes, '\x11');
  v1::AttendResponse response;
  ASSERT_EQ(lane.Attend(request, &response), absl::OkStatus());
  EXPECT_EQ(response.output(), request.query());
  EXPECT_EQ(response.lse().size(), sizeof(float));
}

TEST_F(LocalTest, RefusesWhatCannotBeAnswered) {
  StartLocal();
  Lane lane(path_, 8, 256);
  v1::AttendRequest request = lane.Step(lane.Create());
  request.clear_output_range();
  request.set_num_heads(2);  // 128 bytes of output, and the rest of the answer
  request.mutable_query_range()->set_bytes(2 * kRowBytes);
  const absl::Status status = lane.Attend(request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("use output_range"));
}

TEST_F(LocalTest, RingsAndCallsTellTheReason) {
  StartLocal();
  Lane lane(path_);
  const std::string id = lane.Create();
  v1::AttendRequest request = lane.Step(id);
  request.mutable_spans(0)->set_expected_length(5);
  v1::AttendResponse response;
  EXPECT_EQ(lane.Attend(request, &response).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(testing::InfoOf(response.status()).reason(), "LENGTH_MISMATCH");
  EXPECT_EQ(testing::InfoOf(response.status()).metadata().at("actual"), "0");

  request = lane.Step(id);
  request.mutable_query_range()->set_region_id(std::string(16, 'x'));
  EXPECT_EQ(lane.Attend(request, &response).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(testing::InfoOf(response.status()).reason(), "REGION_LOST");

  v1::DeleteSequenceRequest gone;
  gone.set_sequence_id(SequenceId::Random().ToBytes());
  v1::LocalReply reply;
  EXPECT_EQ(lane.client.Do(CallOf("DeleteSequence", gone), &reply).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(testing::InfoOf(reply.status()).reason(), "SEQUENCE_LOST");
  v1::LocalRequest unregister;
  unregister.mutable_unregister_memory()->set_region_id(std::string(16, 'x'));
  EXPECT_EQ(lane.client.Do(unregister, &reply).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(testing::InfoOf(reply.status()).reason(), "REGION_LOST");
}

TEST_F(LocalTest, CallsEveryMethodByName) {
  StartLocal();
  const auto client = Greeted();
  v1::GetServerInfoResponse info;
  ASSERT_EQ(client->Call("GetServerInfo", v1::GetServerInfoRequest(), &info), absl::OkStatus());
  EXPECT_EQ(info.version(), "test");
  EXPECT_EQ(info.limits().max_connection_rings(), 16);
  v1::CreateSequenceResponse created;
  ASSERT_EQ(client->Call("CreateSequence", testing::CreateRequest(), &created), absl::OkStatus());
  v1::ForkSequenceRequest fork;
  fork.set_sequence_id(created.sequence_id());
  v1::ForkSequenceResponse forked;
  ASSERT_EQ(client->Call("ForkSequence", fork, &forked), absl::OkStatus());
  v1::AttendResponse attended;
  ASSERT_EQ(client->Call("Attend", StepRequest({forked.sequence_id()}), &attended),
            absl::OkStatus());
  EXPECT_EQ(attended.output().size(), kRowBytes);
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(forked.sequence_id());
  v1::TruncateSequenceResponse truncated;
  ASSERT_EQ(client->Call("TruncateSequence", truncate, &truncated), absl::OkStatus());
  v1::GetSequenceRequest get;
  get.set_sequence_id(forked.sequence_id());
  v1::GetSequenceResponse got;
  ASSERT_EQ(client->Call("GetSequence", get, &got), absl::OkStatus());
  EXPECT_EQ(got.sequence().layer_lengths(0), 0);
  v1::ListSequencesResponse list;
  ASSERT_EQ(client->Call("ListSequences", v1::ListSequencesRequest(), &list), absl::OkStatus());
  EXPECT_EQ(list.sequences_size(), 2);
  v1::ManageSequencesRequest manage;
  manage.add_operations()->mutable_delete_()->set_sequence_id(created.sequence_id());
  v1::ManageSequencesResponse managed;
  ASSERT_EQ(client->Call("ManageSequences", manage, &managed), absl::OkStatus());
  ASSERT_EQ(managed.results_size(), 1);
  EXPECT_EQ(managed.results(0).status().code(), 0);
  v1::DeleteSequenceRequest remove;
  remove.set_sequence_id(forked.sequence_id());
  v1::DeleteSequenceResponse removed;
  ASSERT_EQ(client->Call("DeleteSequence", remove, &removed), absl::OkStatus());
  EXPECT_EQ(client->Call("GetSequence", get, &got).code(), absl::StatusCode::kNotFound);
  v1::HoldLeaseResponse lease;
  EXPECT_EQ(client->Call("HoldLease", v1::HoldLeaseRequest(), &lease), absl::OkStatus());
  EXPECT_EQ(client->Call("AttendStream", get, &got).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(Requests("GetSequence"), 2);
  // Whoever comes over gRPC is somebody else.
  grpc::ClientContext context;
  v1::GetSequenceResponse foreign;
  get.set_sequence_id(created.sequence_id());
  EXPECT_EQ(stub_->GetSequence(&context, get, &foreign).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(LocalTest, ALeaseLivesAsLongAsItsConnection) {
  StartLocal();
  const auto client = Greeted(), other = Greeted();
  v1::HoldLeaseResponse lease, again, of_other;
  ASSERT_EQ(client->Call("HoldLease", v1::HoldLeaseRequest(), &lease), absl::OkStatus());
  ASSERT_EQ(client->Call("HoldLease", v1::HoldLeaseRequest(), &again), absl::OkStatus());
  ASSERT_EQ(other->Call("HoldLease", v1::HoldLeaseRequest(), &of_other), absl::OkStatus());
  EXPECT_EQ(lease.lease_id().size(), 16u);
  EXPECT_EQ(again.lease_id(), lease.lease_id());
  EXPECT_NE(of_other.lease_id(), lease.lease_id());
  v1::CreateSequenceRequest create = testing::CreateRequest();
  create.set_lease_id(lease.lease_id());
  v1::CreateSequenceResponse leased, kept;
  ASSERT_EQ(client->Call("CreateSequence", create, &leased), absl::OkStatus());
  EXPECT_TRUE(leased.sequence().leased());
  // Connections of one user are one client, which may name its lease on each of them.
  ASSERT_EQ(other->Call("CreateSequence", create, &leased), absl::OkStatus());
  ASSERT_EQ(client->Call("CreateSequence", testing::CreateRequest(), &kept), absl::OkStatus());
  EXPECT_EQ(Requests("HoldLease"), 3);
  EXPECT_EQ(engine_->sequences().stats().sequences, 3u);
  shutdown(client->fd(), SHUT_RDWR);
  ASSERT_TRUE(testing::WaitUntil([&] { return engine_->sequences().stats().sequences == 1; }));
  EXPECT_EQ(other->Call("CreateSequence", create, &leased).code(), absl::StatusCode::kNotFound);
  v1::GetSequenceRequest get;
  get.set_sequence_id(kept.sequence_id());
  v1::GetSequenceResponse got;
  EXPECT_EQ(other->Call("GetSequence", get, &got), absl::OkStatus());
}

TEST_F(LocalTest, LoadsASequence) {
  StartLocal();
  Lane lane(path_);
  v1::LoadSequenceRequest chunk;
  chunk.set_sequence_id(lane.Create());
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(2);
  chunk.set_key(std::string(2 * kRowBytes, '\0'));
  chunk.set_value(chunk.key());
  v1::LoadSequenceResponse response;
  ASSERT_EQ(lane.client.Call("LoadSequence", chunk, &response), absl::OkStatus());
  EXPECT_EQ(response.sequence().layer_lengths(0), 2);
  chunk.clear_key();  // the rest is in shared memory
  chunk.clear_value();
  chunk.set_rows(3);
  chunk.set_expected_length(2);
  for (v1::MemoryRange* range : {chunk.mutable_key_range(), chunk.mutable_value_range()}) {
    range->set_region_id(lane.region);
    range->set_offset(Lane::kTensors);
    range->set_bytes(3 * kRowBytes);
  }
  ASSERT_EQ(lane.client.Call("LoadSequence", chunk, &response), absl::OkStatus());
  EXPECT_EQ(response.sequence().layer_lengths(0), 5);
  EXPECT_EQ(lane.client.Call("LoadSequence", chunk, &response).code(),
            absl::StatusCode::kFailedPrecondition);
  chunk.set_rows(0);
  EXPECT_THAT(lane.client.Call("LoadSequence", chunk, &response).message(), HasSubstr("rows"));
  EXPECT_EQ(Requests("LoadSequence"), 4);
}

TEST_F(LocalTest, DeadlinesAndCancellationsReachTheQueue) {
  StartLocal();
  Lane lane(path_);
  ClientRing other;
  ASSERT_EQ(other.Open(&lane.client, lane.memory, lane.region, 16 * kPage, 8, 1024),
            absl::OkStatus());
  ASSERT_TRUE(SubmitAtGate(&lane));
  lane.ring.Submit(2, lane.Step(lane.Create()), /*timeout_ns=*/1);
  lane.ring.Submit(3, lane.Step(lane.Create()));
  ASSERT_TRUE(WaitForQueued(2));
  v1::LocalRequest cancel;
  cancel.mutable_cancel()->set_in_ring(true);
  cancel.mutable_cancel()->set_ring(lane.ring.number());
  cancel.mutable_cancel()->set_tag(3);
  SendTo(&lane.client, {cancel});
  // The server does what a connection sends in its order.
  v1::LocalRequest close;
  close.mutable_close_ring()->set_ring(other.number());
  ASSERT_EQ(lane.client.Do(close), absl::OkStatus());
  gate_.SetOpen(true);
  v1::AttendResponse response;
  uint64_t tag = 0;
  std::vector<int> codes(4);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(lane.ring.Receive(&tag, &response));
    ASSERT_LT(tag, codes.size());
    codes[tag] = response.status().code();
  }
  EXPECT_EQ(codes[1], static_cast<int>(absl::StatusCode::kOk));
  EXPECT_EQ(codes[2], static_cast<int>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(codes[3], static_cast<int>(absl::StatusCode::kCancelled));
}

TEST_F(LocalTest, ACancelledCallIsAnswered) {
  StartLocal();
  Lane lane(path_);
  ASSERT_TRUE(SubmitAtGate(&lane));
  const uint64_t id = SendTo(&lane.client, {CallOf("Attend", StepRequest({lane.Create()}))});
  ASSERT_TRUE(WaitForQueued(1));
  v1::LocalRequest cancel;
  cancel.set_id(id);
  cancel.mutable_cancel();
  ASSERT_TRUE(lane.client.Send(cancel));
  lane.Create();
  gate_.SetOpen(true);
  ExpectReply(&lane.client, id, absl::StatusCode::kCancelled);
}

TEST_F(LocalTest, AClosedRingIsNotTouched) {
  StartLocal();
  Lane lane(path_);
  ASSERT_TRUE(SubmitAtGate(&lane));
  v1::LocalRequest close;
  close.mutable_close_ring()->set_ring(lane.ring.number());
  const uint64_t id = SendTo(&lane.client, {close});
  // It is being closed: the first reply is still to come.
  EXPECT_EQ(lane.client.Do(close).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(metrics_->local_rings.Value(), 1);
  gate_.SetOpen(true);
  ExpectReply(&lane.client, id);
  EXPECT_EQ(metrics_->local_rings.Value(), 0);
}

TEST_F(LocalTest, MemoryStaysUntilTheLastRequestHasEnded) {
  StartLocal();
  Lane lane(path_);
  Memfd tensors(4 * kPage);
  std::string region;
  ASSERT_EQ(lane.client.Register(tensors.fd(), tensors.bytes(), &region), absl::OkStatus());
  v1::AttendRequest request = lane.Step(lane.Create());
  request.mutable_output_range()->set_region_id(region);
  request.mutable_output_range()->set_offset(0);
  std::memset(lane.memory.data() + Lane::kTensors, 0x11, kRowBytes);
  ASSERT_TRUE(SubmitAtGate(&lane, request));
  ASSERT_EQ(lane.client.Unregister(region), absl::OkStatus());
  EXPECT_EQ(lane.client.Unregister(region).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(metrics_->shared_memory_regions.Value(), 2);
  gate_.SetOpen(true);
  v1::AttendResponse response;
  uint64_t tag = 0;
  ASSERT_TRUE(lane.ring.Receive(&tag, &response));
  EXPECT_EQ(response.status().message(), "");
  EXPECT_EQ(tensors.data()[0], std::byte{0x11});
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->shared_memory_regions.Value() == 1; }));
  EXPECT_EQ(lane.Attend(request).code(), absl::StatusCode::kNotFound);
}

TEST_F(LocalTest, ADrainAnswersWhatIsInFlightAndRefusesTheRest) {
  StartLocal();
  Lane lane(path_);
  const v1::AttendRequest request = lane.Step(lane.Create());
  ASSERT_TRUE(SubmitAtGate(&lane, request));
  auto drained = StartDrain();
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->serving.Value() == 0; }));
  v1::AttendResponse response;
  uint64_t tag = 2;
  // Health changes first.
  do {
    lane.ring.Submit(++tag, v1::AttendRequest());
    ASSERT_TRUE(lane.ring.Receive(&tag, &response));
  } while (response.status().code() == static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(response.status().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  gate_.SetOpen(true);
  ASSERT_TRUE(lane.ring.Receive(&tag, &response));
  EXPECT_EQ(tag, 1);
  EXPECT_EQ(response.status().code(), 0);
  EXPECT_TRUE(drained.get());
  server_.reset();
  EXPECT_FALSE(lane.client.Receive().has_value());
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(LocalTest, ADrainRefusesCalls) {
  StartLocal();
  Lane lane(path_);
  ASSERT_TRUE(SubmitAtGate(&lane));
  auto drained = StartDrain();
  absl::Status status;
  EXPECT_TRUE(testing::WaitUntil([&] { return !(status = GetInfo(&lane.client)).ok(); }));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  v1::ListSequencesResponse list;
  EXPECT_EQ(lane.client.Call("ListSequences", v1::ListSequencesRequest(), &list).code(),
            absl::StatusCode::kUnavailable);
  gate_.SetOpen(true);
  EXPECT_TRUE(drained.get());
}

TEST_F(LocalTest, AMessageThatCannotBeParsedIsRefused) {
  StartLocal();
  const auto client = Greeted();
  for (const char* method : {"GetServerInfo", "ListSequences", "HoldLease", "Attend"}) {
    v1::LocalRequest call;
    call.mutable_call()->set_method(method);
    call.mutable_call()->set_message("\xff");
    EXPECT_EQ(client->Do(call).code(), absl::StatusCode::kInvalidArgument) << method;
  }
}

TEST_F(LocalTest, ARegistrationDelaysItsConnectionOnly) {
  StartLocal();
  const auto client = Greeted(), other = Greeted();
  Memfd memory(kPage);
  v1::LocalRequest registration;
  registration.mutable_register_memory()->set_bytes(kPage);
  gate_.HoldRegistrations(true);
  const uint64_t first =
      SendTo(client.get(), {registration, CallOf("GetServerInfo", v1::GetServerInfoRequest())},
             memory.fd());
  EXPECT_TRUE(testing::WaitUntil([&] { return gate_.registrations() == 1; }));
  v1::ListSequencesResponse list;
  EXPECT_EQ(GetInfo(other.get()), absl::OkStatus());
  EXPECT_EQ(other->Call("ListSequences", v1::ListSequencesRequest(), &list), absl::OkStatus());
  EXPECT_EQ(Requests("GetServerInfo"), 1);
  gate_.HoldRegistrations(false);
  for (const uint64_t id : {first, first + 1}) ExpectReply(client.get(), id);
}

TEST_F(LocalTest, CallsBeyondTheLimitOfAConnectionAreNotRead) {
  constexpr int kCalls = 4;
  Server::Options options = LocalServerOptions();
  options.connections.max_streams = kCalls;
  StartLocal(options);
  const auto client = Greeted(), other = Greeted();
  v1::LoadSequenceRequest chunk;
  chunk.set_layout(v1::LAYOUT_NHD);
  chunk.set_rows(1);
  chunk.set_key(std::string(kRowBytes, '\0'));
  chunk.set_value(chunk.key());
  std::vector<v1::LocalRequest> calls;
  for (int i = 0; i < kCalls; ++i) {
    chunk.set_sequence_id(Create());
    calls.push_back(i % 2 == 0 ? CallOf("LoadSequence", chunk)
                               : CallOf("Attend", StepRequest({Create()})));
  }
  calls.push_back(CallOf("GetServerInfo", v1::GetServerInfoRequest()));
  gate_.SetOpen(false);
  SendTo(client.get(), calls);
  ASSERT_TRUE(WaitForArrived(1));
  ASSERT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() >= kCalls; }));
  // Whatever was read before this call would have been answered before it.
  v1::ListSequencesResponse list;
  EXPECT_EQ(other->Call("ListSequences", v1::ListSequencesRequest(), &list), absl::OkStatus());
  EXPECT_EQ(Requests("GetServerInfo"), 0);
  gate_.SetOpen(true);
  for (int i = 0; i < kCalls + 1; ++i) EXPECT_TRUE(client->Receive().has_value());
  EXPECT_EQ(Requests("GetServerInfo"), 1);
}

TEST_F(LocalTest, AClientWithoutRoomForCallsIsReadOnceTheyAreAnswered) {
  Server::Options options = LocalServerOptions();
  options.transport_memory_bytes = 64 << 10;  // a quarter of it for one client
  StartLocal(options);
  const auto client = Greeted(), other = Greeted();
  v1::CreateSequenceResponse created;
  ASSERT_EQ(client->Call("CreateSequence", testing::CreateRequest(), &created), absl::OkStatus());
  v1::AttendRequest step = StepRequest({created.sequence_id()});
  step.mutable_spans(0)->set_query_rows(32);  // 2 KiB
  step.mutable_query()->resize(32 * kRowBytes);
  constexpr int kCalls = 12;
  gate_.SetOpen(false);
  SendTo(client.get(), std::vector<v1::LocalRequest>(kCalls, CallOf("Attend", step)));
  ASSERT_TRUE(WaitForArrived(1));
  // Each takes a bit more than 3 KiB of the 16.
  EXPECT_TRUE(testing::WaitUntil([&] { return metrics_->inflight_requests.Value() == 6; }));
  SendTo(other.get(), {CallOf("GetServerInfo", v1::GetServerInfoRequest())});
  EXPECT_EQ(metrics_->inflight_requests.Value(), 6);
  gate_.SetOpen(true);
  for (int i = 0; i < kCalls; ++i) ExpectReply(client.get(), 0);
  EXPECT_TRUE(other->Receive().has_value());
}

TEST_F(LocalTest, ARegionIsThereForTheCallsAheadOfItsEnd) {
  StartLocal();
  Lane lane(path_);
  const v1::AttendRequest step = lane.Step(lane.Create());
  v1::LocalRequest unregister;
  unregister.mutable_unregister_memory()->set_region_id(lane.region);
  SendTo(&lane.client, {CallOf("ListSequences", v1::ListSequencesRequest()),  // not at once
                        CallOf("Attend", step), unregister});
  for (int i = 0; i < 3; ++i) ExpectReply(&lane.client, 0);
}

TEST_F(LocalTest, TheServerEndsWithRequestsInTheEngine) {
  StartLocal();
  Lane lane(path_);
  ASSERT_TRUE(SubmitAtGate(&lane));
  SendTo(&lane.client, {CallOf("Attend", StepRequest({lane.Create()}))});
  ASSERT_TRUE(WaitForQueued(1));
  auto ended = std::async(std::launch::async, [&] { server_.reset(); });
  EXPECT_FALSE(lane.client.Receive().has_value());
  gate_.SetOpen(true);
  ended.get();
}

TEST_F(LocalTest, LimitsConnectionsOfOneUser) {
  StartWithRoomFor(3);
  std::vector<std::unique_ptr<LocalClient>> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(Greeted());
  LocalClient one_more(path_);
  EXPECT_FALSE(one_more.Receive().has_value());
  clients.pop_back();
  ASSERT_TRUE(WaitForConnections(2));
  EXPECT_EQ(LocalClient(path_).Hello(), absl::OkStatus());
}

TEST_F(LocalTest, AnIdleConnectionMakesRoomForOneOfItsUser) {
  StartWithRoomFor(4);
  Lane lane(path_);  // has a ring
  const auto lessee = Greeted();
  v1::HoldLeaseResponse lease;
  ASSERT_EQ(lessee->Call("HoldLease", v1::HoldLeaseRequest(), &lease), absl::OkStatus());
  const auto called = Greeted(), idle = Greeted();
  fake_clock_.Advance(Door::kIdleAfter);
  ASSERT_EQ(GetInfo(called.get()), absl::OkStatus());
  const auto first = Greeted();
  EXPECT_FALSE(idle->Receive().has_value());
  fake_clock_.Advance(Door::kIdleAfter);
  ASSERT_EQ(GetInfo(first.get()), absl::OkStatus());
  const auto second = Greeted();
  EXPECT_FALSE(called->Receive().has_value());
  LocalClient refused(path_);  // the others are in use, or were a moment ago
  EXPECT_FALSE(refused.Receive().has_value());
  for (LocalClient* client : {lessee.get(), first.get(), second.get(), &lane.client}) {
    EXPECT_EQ(GetInfo(client), absl::OkStatus());
  }
}

TEST_F(LocalTest, ASilentConnectionMakesRoomFirst) {
  StartWithRoomFor(2);
  const auto greeted = Greeted();
  fake_clock_.Advance(Door::kIdleAfter);
  LocalClient silent(path_);
  ASSERT_TRUE(WaitForConnections(2));
  const auto other = Greeted();
  EXPECT_FALSE(silent.Receive().has_value());
  EXPECT_EQ(GetInfo(greeted.get()), absl::OkStatus());
}

TEST_F(LocalTest, GivesUpOnAClientThatSaysNothing) {
  clock_ = &fake_clock_;
  const Server::Options options = LocalServerOptions();
  StartLocal(options);
  const auto greeted = Greeted();
  LocalClient silent(path_);
  ASSERT_TRUE(WaitForConnections(2));
  fake_clock_.Advance(options.connections.accept.first_bytes_within);
  EXPECT_FALSE(silent.Receive().has_value());
  EXPECT_EQ(GetInfo(greeted.get()), absl::OkStatus());
}

TEST_F(LocalTest, RefusesOtherVersions) {
  StartLocal();
  LocalClient client(path_);
  v1::LocalRequest request;
  request.mutable_hello()->set_min_version(2);
  request.mutable_hello()->set_max_version(3);
  EXPECT_EQ(client.Do(request).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(client.Receive().has_value());
}

// Runs Hello in a process of user 65534. Returns the status code that the server gave it.
int HelloOfOverflowUid(const std::string& path) {
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(100);
    LocalClient client(path);
    _exit(client.connected() ? static_cast<int>(client.Hello().code()) : 101);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

TEST_F(LocalTest, RefusesTheOverflowUidUnlessAllowed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  Server::Options options = LocalServerOptions();
  options.unix_sockets.mode = 0666;
  StartLocal(options);
  EXPECT_EQ(HelloOfOverflowUid(path_), static_cast<int>(absl::StatusCode::kUnauthenticated));
  server_.reset();
  options.authenticator.allow_overflow_uid = true;
  server_ = Server::Start(options, fleet_.get(), metrics_.get()).value();
  EXPECT_EQ(HelloOfOverflowUid(options.local_listen), 0);
}

}  // namespace
}  // namespace flashcore::server
