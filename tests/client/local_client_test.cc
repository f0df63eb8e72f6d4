#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"
#include "flashcore/error_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/wire/ring.h"
#include "tests/client/error_status.h"
#include "tests/client/fake_local_server.h"
#include "tests/client/request_fixture.h"

namespace flashcore {
namespace {

using ::testing::HasSubstr;

ClientOptions QuickRetries(int max_attempts) {
  ClientOptions options;
  options.timeout = absl::Minutes(1);
  options.retry.max_attempts = max_attempts;
  options.retry.initial_backoff = absl::Milliseconds(1);
  options.retry.max_backoff = absl::Milliseconds(4);
  return options;
}

std::unique_ptr<Client> ClientOf(const FakeLocalServer& server, int max_attempts = 1) {
  return *Client::Create(server.target(), QuickRetries(max_attempts));
}

v1::Status Code(absl::StatusCode code, const std::string& message = "told to") {
  v1::Status status;
  status.set_code(static_cast<int>(code));
  status.set_message(message);
  return status;
}

// Waits with a generous limit; a test fails if the condition does not come true.
template <typename Condition>
void WaitUntil(Condition condition) {
  const absl::Time end = absl::Now() + absl::Seconds(60);
  while (!condition()) {
    ASSERT_LT(absl::Now(), end);  // gate: ends a hang
    absl::SleepFor(absl::Milliseconds(1));
  }
}

void ExpectRight(const RequestFixture& r) {
  EXPECT_EQ(r.output, r.query);
  EXPECT_EQ(r.lse_values.back(), static_cast<float>(r.lse_values.size() - 1));
}

// Waits for the callback of an AttendAsync.
struct Async {
  absl::Notification done;
  absl::Status status;
  AttendResult result;

  Client::AttendCallback Callback() {
    return [this](absl::Status s, AttendResult r) {
      status = std::move(s);
      result = std::move(r);
      done.Notify();
    };
  }
  const absl::Status& Wait() {
    done.WaitForNotification();
    return status;
  }
};

CallOptions Within(absl::Duration timeout) {
  CallOptions call;
  call.deadline = absl::Now() + timeout;
  return call;
}

// Keeps the last request in `*got`, and serves it.
void Keep(v1::AttendRequest* got, FakeLocalServer* server) {
  server->on_attend = [got](const v1::AttendRequest& request) {
    *got = request;
    return v1::Status();
  };
}

// A request whose tensors need memory of their own.
struct LargeTensors {
  LargeTensors() {
    request.spans = {{40'000, 1}};
    request.num_heads = request.num_kv_heads = 1;
    request.head_dim = 64;
    query.resize(request.QueryBytes());
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<std::byte>(i * 31 >> 3);
    kv.resize(request.KvBytes());
    output.resize(query.size());
    request.query = query;
    request.key = request.value = kv;
    request.output = absl::MakeSpan(output);
  }
  LargeTensors(const LargeTensors&) = delete;

  AttendRequest request;
  std::vector<std::byte> query, kv, output;
};

// A request that does not fit in a slot of a ring.
struct ManySpans {
  explicit ManySpans(int spans = 2000) {
    for (int i = 0; i < spans; ++i) {
      request.spans.push_back({1, 0, absl::StrCat(100'000'000'000'000 + i, "x"), uint64_t{5}});
    }
    request.num_heads = request.num_kv_heads = 1;
    request.head_dim = 8;
    query.assign(request.QueryBytes(), std::byte{3});
    output.resize(query.size());
    request.query = query;
    request.output = absl::MakeSpan(output);
  }
  ManySpans(const ManySpans&) = delete;

  AttendRequest request;
  std::vector<std::byte> query, output;
};

// AttendAsync into the results of `*gone`; the inputs, which it has copied, go.
void SendAndDropInputs(Client* client, RequestFixture* gone, Async* async) {
  RequestFixture inputs;
  inputs.request.output = absl::MakeSpan(gone->output);
  inputs.request.lse = absl::MakeSpan(gone->lse_values);
  client->AttendAsync(inputs.request, async->Callback());
}

// A server that does not answer calls, and their ids.
struct UnansweredCalls {
  UnansweredCalls() {
    server.on_request = [this](const v1::LocalRequest& request, v1::LocalReply* reply) {
      absl::MutexLock lock(&mutex);
      if (request.has_cancel()) cancelled.push_back(request.id());
      if (!request.has_call()) return false;
      called.push_back(request.id());
      reply->set_id(12'345);  // of nobody
      return true;
    };
  }

  size_t count() {
    absl::MutexLock lock(&mutex);
    return called.size();
  }
  void WaitUntilAllAreCancelled() {
    WaitUntil([this] {
      absl::MutexLock lock(&mutex);
      return cancelled == called;
    });
  }

  absl::Mutex mutex;
  std::vector<uint64_t> called ABSL_GUARDED_BY(mutex), cancelled ABSL_GUARDED_BY(mutex);
  FakeLocalServer server;  // last: its threads use the others
};

// So that no deadline of a test passes while the connection, or a ring, is being opened.
void OpenBothRings(Client* client) {
  RequestFixture r;
  EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
  Async async;
  client->AttendAsync(r.request, async.Callback());
  EXPECT_EQ(async.Wait(), absl::OkStatus());
}

TEST(LocalClientTest, AttendGoesOverTheRing) {
  FakeLocalServer server;
  v1::AttendRequest got;
  Keep(&got, &server);
  const auto client = ClientOf(server);
  RequestFixture r("name");
  r.request.mask = Mask::Causal();
  AttendResult result;
  for (int i = 0; i < 3; ++i) {
    r.output.assign(r.output.size(), std::byte{0});
    ASSERT_EQ(client->Attend(r.request, &result), absl::OkStatus());
    ExpectRight(r);
  }
  EXPECT_EQ(server.taken(), 3);
  EXPECT_EQ(result.request_id, "name");
  EXPECT_EQ(result.timing.kernel_ns, 1000u);
  EXPECT_EQ(result.attempts, 1);
  EXPECT_EQ(result.request_bytes, got.ByteSizeLong());
  EXPECT_GT(result.response_bytes, 0u);
  EXPECT_EQ(got.mask().kind(), v1::Mask::KIND_CAUSAL);
  EXPECT_TRUE(got.query().empty());
  EXPECT_TRUE(got.has_key_range());
  EXPECT_TRUE(got.has_lse_range());
}

TEST(LocalClientTest, SharedMemoryIsUsedInPlace) {
  FakeLocalServer server;
  v1::AttendRequest got;
  Keep(&got, &server);
  const auto client = ClientOf(server);
  RequestFixture r;
  auto memory = client->CreateSharedMemory(1 << 16);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  EXPECT_TRUE((*memory)->registered());
  std::byte* const query = (*memory)->data() + 4096;
  std::copy(r.query.begin(), r.query.end(), query);
  r.request.query = {query, r.query.size()};
  r.request.output = {(*memory)->data() + 8192, r.query.size()};
  ASSERT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
  EXPECT_EQ(got.query_range().offset(), 4096u);
  EXPECT_EQ(got.output_range().offset(), 8192u);
  EXPECT_TRUE(std::equal(r.query.begin(), r.query.end(), (*memory)->data() + 8192));
  const size_t regions = server.regions();
  memory->reset();
  WaitUntil([&] { return server.regions() == regions - 1; });
}

TEST(LocalClientTest, LargeTensorsGetMemoryThatIsReused) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  LargeTensors large;
  size_t regions = 0;
  for (int i = 0; i < 3; ++i) {
    large.output.assign(large.output.size(), std::byte{0});
    ASSERT_EQ(client->Attend(large.request, nullptr), absl::OkStatus());
    EXPECT_EQ(large.output, large.query);
    if (i == 0) regions = server.regions();
    EXPECT_EQ(server.regions(), regions);
  }
}

TEST(LocalClientTest, AMessageThatDoesNotFitASlotIsACall) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  ManySpans large;
  AttendResult result;
  ASSERT_EQ(client->Attend(large.request, &result), absl::OkStatus());
  EXPECT_EQ(large.output, large.query);
  EXPECT_EQ(result.sequence_lengths, std::vector<uint64_t>(2000, 5));
  EXPECT_EQ(server.taken(), 0);
  large.output.assign(large.output.size(), std::byte{0});
  Async async;
  client->AttendAsync(large.request, async.Callback());
  EXPECT_EQ(async.Wait(), absl::OkStatus());
  EXPECT_EQ(large.output, large.query);

  EXPECT_THAT(client->Attend(ManySpans(50'000).request, nullptr).message(),
              HasSubstr("over the 1048576"));  // and over a frame
  EXPECT_EQ(client->Attend(RequestFixture().request, nullptr), absl::OkStatus());
}

TEST(LocalClientTest, MemoryOfACallThatWasGivenUpIsNotReusedMeanwhile) {
  absl::Notification answers;
  std::atomic<bool> called{false};
  v1::AttendRequest given_up, other;
  FakeLocalServer server;  // it answers what was given up after the client has gone
  server.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (!request.has_call() || called) return false;
    EXPECT_TRUE(given_up.ParseFromString(request.call().message()));
    called = true;
    answers.WaitForNotification();
    return false;
  };
  Keep(&other, &server);
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  const ManySpans large;
  while (!called) {
    ASSERT_EQ(client->Attend(large.request, nullptr, Within(absl::Milliseconds(20))).code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  // As much memory, and over a ring.
  ManySpans same(1);
  same.request.spans[0].query_rows = 2000;
  same.query.resize(same.request.QueryBytes());
  same.output.resize(same.query.size());
  same.request.query = same.query;
  same.request.output = absl::MakeSpan(same.output);
  EXPECT_EQ(client->Attend(same.request, nullptr), absl::OkStatus());
  ASSERT_EQ(other.query_range().bytes(), given_up.query_range().bytes());
  EXPECT_TRUE(other.query_range().region_id() != given_up.query_range().region_id() ||
              other.query_range().offset() > given_up.output_range().offset() ||
              other.output_range().offset() < given_up.query_range().offset())
      << other.query_range().offset() << " " << given_up.query_range().offset();
  answers.Notify();
}

TEST(LocalClientTest, AServerThatReadsItsSocketLateDelaysNoOtherRequest) {
  FakeLocalServer server;
  absl::Notification reads_on;
  server.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_call()) reads_on.WaitForNotification();
    return false;
  };
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  constexpr int kLarge = 40;  // more than the socket takes
  constexpr size_t kTensorBytes = 2000 * 8 * 2;
  // A server that does not read registers no memory, so that for tensors must be there.
  auto memory = *client->CreateSharedMemory((2 * kLarge + 2) * kTensorBytes);
  auto place = [at = memory->data()](ManySpans* request) mutable {
    const absl::Span<std::byte> query(at, kTensorBytes), output(at + kTensorBytes, kTensorBytes);
    at += 2 * kTensorBytes;
    std::copy(request->query.begin(), request->query.end(), query.begin());
    request->request.query = query;
    request->request.output = output;
  };
  std::vector<std::unique_ptr<ManySpans>> large;
  std::vector<std::unique_ptr<Async>> all;
  for (int i = 0; i < kLarge; ++i) {
    large.push_back(std::make_unique<ManySpans>());
    place(large.back().get());
    all.push_back(std::make_unique<Async>());
    client->AttendAsync(large.back()->request, all.back()->Callback());
  }
  RequestFixture r;
  Async small, late, cancelled;
  client->AttendAsync(r.request, small.Callback());
  EXPECT_EQ(small.Wait(), absl::OkStatus());
  ManySpans other;
  place(&other);
  client->AttendAsync(other.request, late.Callback(), Within(absl::Milliseconds(20)));
  EXPECT_EQ(late.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  CallHandle handle = client->AttendAsync(other.request, cancelled.Callback());
  handle.Cancel();
  EXPECT_EQ(cancelled.Wait().code(), absl::StatusCode::kCancelled);
  for (const auto& async : all) EXPECT_FALSE(async->done.HasBeenNotified());
  reads_on.Notify();
  for (int i = 0; i < kLarge; ++i) {
    EXPECT_EQ(all[i]->Wait(), absl::OkStatus());
    EXPECT_EQ(large[i]->request.output, absl::MakeConstSpan(large[i]->query));
  }
}

TEST(LocalClientTest, MemoryThatIsBeingRegisteredDelaysNoOtherRequest) {
  absl::Notification registers_on;
  std::atomic<bool> stops{false}, stopped{false};
  FakeLocalServer server;
  server.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_register_memory() && stops) {
      stopped = true;
      registers_on.WaitForNotification();
    }
    return false;
  };
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  stops = true;
  LargeTensors large, other;
  Async waits;
  std::thread caller([&] { client->AttendAsync(large.request, waits.Callback()); });
  WaitUntil([&] { return stopped.load(); });
  RequestFixture r;
  EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
  Async small;
  client->AttendAsync(r.request, small.Callback());
  EXPECT_EQ(small.Wait(), absl::OkStatus());
  // Nor a deadline: of a request that needs such memory too, and of a call.
  const CallOptions call = Within(absl::Milliseconds(20));
  EXPECT_EQ(client->Attend(other.request, nullptr, call).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(client->GetServerInfo(call).status().code(), absl::StatusCode::kDeadlineExceeded);
  registers_on.Notify();
  caller.join();
  EXPECT_EQ(waits.Wait(), absl::OkStatus());
  EXPECT_EQ(large.output, large.query);
}

TEST(LocalClientTest, ErrorsOfRequestsComeBack) {
  FakeLocalServer server;
  server.on_attend = [](const v1::AttendRequest&) {
    return Code(absl::StatusCode::kResourceExhausted, "the queue is full");
  };
  const auto client = ClientOf(server);
  RequestFixture r;
  EXPECT_EQ(client->Attend(r.request, nullptr), absl::ResourceExhaustedError("the queue is full"));
  r.request.query.remove_suffix(1);
  EXPECT_THAT(client->Attend(r.request, nullptr).message(), HasSubstr("query: "));
  EXPECT_EQ(server.taken(), 1);
}

TEST(LocalClientTest, ErrorsHaveTheirInfo) {
  FakeLocalServer server;
  const v1::Status lost =
      StatusWithInfo(absl::StatusCode::kNotFound, "SEQUENCE_LOST", "sequence_ids", "00ff");
  server.on_attend = [&](const v1::AttendRequest&) { return lost; };
  server.on_call = [&](const v1::LocalCall&, std::string*) { return lost; };
  const auto client = ClientOf(server);
  RequestFixture r;
  Async async;
  client->AttendAsync(r.request, async.Callback());
  for (const absl::Status& status :
       {client->Attend(r.request, nullptr), async.Wait(), client->GetServerInfo().status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(GetErrorInfo(status).reason, "SEQUENCE_LOST");
    EXPECT_EQ(GetErrorInfo(status).metadata.at("sequence_ids"), "00ff");
  }
}

TEST(LocalClientTest, ASlotThatBreaksTheProtocolEndsTheConnection) {
  FakeLocalServer server;
  std::atomic<int> answers{0};
  server.on_completion = [&](wire::CompletionSlot* slot) {
    if (answers++ == 0) slot->bytes = 1 << 30;
    if (answers == 3) slot->tag += 7;
  };
  const auto client = ClientOf(server);
  RequestFixture r;
  for (int i = 0; i < 2; ++i) {  // the ring of a call
    EXPECT_EQ(client->Attend(r.request, nullptr).code(), absl::StatusCode::kInternal);
    WaitUntil([&] { return client->Attend(r.request, nullptr).ok(); });
  }
  answers = 0;
  Async broken;  // the ring of callbacks
  client->AttendAsync(r.request, broken.Callback());
  EXPECT_EQ(broken.Wait().code(), absl::StatusCode::kInternal);
  WaitUntil([&] { return client->Attend(r.request, nullptr).ok(); });
}

TEST(LocalClientTest, CallsAreNamed) {
  FakeLocalServer server;
  std::string method;
  server.on_call = [&](const v1::LocalCall& call, std::string* message) {
    method = call.method();
    v1::GetServerInfoResponse info;
    info.set_version("fake");
    *message = info.SerializeAsString();
    return call.timeout_ns() > 0 ? v1::Status() : Code(absl::StatusCode::kInternal);
  };
  const auto client = ClientOf(server);
  EXPECT_EQ(client->GetServerInfo()->version(), "fake");
  EXPECT_EQ(method, "GetServerInfo");
  EXPECT_EQ(*client->CheckHealth(), HealthStatus::kServing);
  EXPECT_EQ(client->CheckHealth("other").status().code(), absl::StatusCode::kNotFound);
}

TEST(LocalClientTest, SequencesLoadFromRegisteredMemory) {
  FakeLocalServer server;
  std::vector<v1::LoadSequenceRequest> chunks;
  server.on_call = [&](const v1::LocalCall& call, std::string* message) {
    if (call.method() == "CreateSequence") {
      v1::CreateSequenceResponse response;
      response.set_sequence_id(std::string(16, 's'));
      *message = response.SerializeAsString();
    } else if (call.method() == "LoadSequence") {
      v1::LoadSequenceResponse response;
      EXPECT_TRUE(chunks.emplace_back().ParseFromString(call.message()));
      *message = response.SerializeAsString();
    }
    return v1::Status();
  };
  const auto client = ClientOf(server);
  SequenceOptions options;
  options.num_kv_heads = 2;
  options.head_dim = 64;
  const auto sequence = client->CreateSequence(options);
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  const std::vector<std::byte> rows(40'000 * sequence->RowBytes());
  ASSERT_EQ(sequence->Append(0, rows, rows, Layout::kHND, 10).status(), absl::OkStatus());
  ASSERT_GT(chunks.size(), 2u);
  uint64_t length = 10;
  for (const v1::LoadSequenceRequest& chunk : chunks) {
    EXPECT_EQ(chunk.sequence_id(), std::string(16, 's'));
    EXPECT_EQ(chunk.expected_length(), length);
    EXPECT_TRUE(chunk.has_key_range() && chunk.has_value_range());
    length += chunk.rows();
  }
  EXPECT_EQ(length, 40'010u);
}

TEST(LocalClientTest, ManyThreadsShareAClient) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 12; ++t) {  // more than there are rings
    threads.emplace_back([&, t] {
      RequestFixture r(absl::StrCat(t));
      for (size_t i = 0; i < r.query.size(); ++i) r.query[i] = static_cast<std::byte>(i * t);
      for (int i = 0; i < 50; ++i) {
        r.output.assign(r.output.size(), std::byte{0xff});
        AttendResult result;
        if (client->Attend(r.request, &result).ok() && r.output == r.query &&
            result.request_id == absl::StrCat(t)) {
          ++right;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 600);
  EXPECT_LE(server.rings(), 9u);
  EXPECT_LE(server.regions(), 2u);
}

TEST(LocalClientTest, MoreCallbacksThanSlotsLoseNothing) {
  FakeLocalServer server;
  server.Hold(true);
  const auto client = ClientOf(server);
  constexpr int kRequests = 300;
  std::vector<std::unique_ptr<RequestFixture>> requests;
  std::atomic<int> ok{0}, ended{0};
  for (int i = 0; i < kRequests; ++i) {
    requests.push_back(std::make_unique<RequestFixture>(absl::StrCat(i)));
    client->AttendAsync(requests.back()->request, [&](const absl::Status& status, AttendResult) {
      if (status.ok()) ++ok;
      ++ended;
    });
  }
  WaitUntil([&] { return server.taken() == 64; });  // the slots of the ring
  EXPECT_EQ(ended, 0);
  server.Hold(false);
  WaitUntil([&] { return ended == kRequests; });
  EXPECT_EQ(ok, kRequests);
  for (const auto& r : requests) ExpectRight(*r);
}

TEST(LocalClientTest, DeadlinesAndCancels) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  RequestFixture r;
  OpenBothRings(client.get());
  server.Hold(true);
  // Once more, with more time, if the deadline passed before the request was in the ring.
  for (absl::Duration timeout = absl::Milliseconds(20); server.submitted() == 2; timeout *= 2) {
    EXPECT_EQ(client->Attend(r.request, nullptr, Within(timeout)).code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  Async late;
  client->AttendAsync(r.request, late.Callback(), Within(absl::Milliseconds(20)));
  EXPECT_EQ(late.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  Async cancelled;
  CallHandle handle = client->AttendAsync(r.request, cancelled.Callback());
  WaitUntil([&] { return server.taken() == 5; });
  handle.Cancel();
  EXPECT_EQ(cancelled.Wait().code(), absl::StatusCode::kCancelled);
  WaitUntil([&] { return server.cancelled() == 3; });
  server.Hold(false);
  for (int i = 0; i < 20; ++i) {  // late answers belong to nobody
    r.output.assign(r.output.size(), std::byte{0});
    ASSERT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
    ExpectRight(r);
  }
}

TEST(LocalClientTest, ADeadlineEndsARequestBesideOthersWithLaterOnes) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  server.Hold(true);
  RequestFixture r;
  Async later, sooner;
  client->AttendAsync(r.request, later.Callback());
  WaitUntil([&] { return server.sleepers() == 1; });  // the thread of the callbacks
  client->AttendAsync(r.request, sooner.Callback(), Within(absl::Milliseconds(20)));
  EXPECT_EQ(sooner.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  server.Hold(false);
  EXPECT_EQ(later.Wait(), absl::OkStatus());
}

TEST(LocalClientTest, ADeadlineOfACallCancelsIt) {
  UnansweredCalls calls;
  const auto client = ClientOf(calls.server);
  ASSERT_EQ(client->Attend(RequestFixture().request, nullptr), absl::OkStatus());  // connects
  // Once more, with more time, if the deadline passed before the call came.
  for (absl::Duration timeout = absl::Milliseconds(20); calls.count() == 0; timeout *= 2) {
    EXPECT_EQ(client->GetServerInfo(Within(timeout)).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  calls.WaitUntilAllAreCancelled();
}

TEST(LocalClientTest, ARequestThatIsACallIsCancelledOnceItIsGivenUp) {
  UnansweredCalls calls;
  const auto client = ClientOf(calls.server);
  OpenBothRings(client.get());
  ManySpans large;
  Async cancelled;
  CallHandle handle = client->AttendAsync(large.request, cancelled.Callback());
  WaitUntil([&] { return calls.count() == 1; });
  handle.Cancel();
  EXPECT_EQ(cancelled.Wait().code(), absl::StatusCode::kCancelled);
  calls.WaitUntilAllAreCancelled();
  for (absl::Duration timeout = absl::Milliseconds(20); calls.count() == 1; timeout *= 2) {
    EXPECT_EQ(client->Attend(large.request, nullptr, Within(timeout)).code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  calls.WaitUntilAllAreCancelled();
}

// The range of the clock ends in 2262.
TEST(LocalClientTest, TimeoutsOfAnySizeMeanWhatTheySay) {
  std::atomic<uint64_t> limits{0};
  FakeLocalServer server;
  server.on_call = [&](const v1::LocalCall& call, std::string*) {
    limits += call.timeout_ns();
    return v1::Status();
  };
  RequestFixture r;
  for (const absl::Duration timeout :
       {absl::InfiniteDuration(), absl::Hours(24) * 365 * 400, absl::Seconds(1e300)}) {
    ClientOptions options;
    options.timeout = timeout;
    const auto client = *Client::Create(server.target(), options);
    EXPECT_EQ(client->GetServerInfo().status(), absl::OkStatus()) << timeout;
    EXPECT_EQ(client->GetServerInfo(Within(timeout)).status(), absl::OkStatus()) << timeout;
    EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus()) << timeout;
    Async async;
    client->AttendAsync(r.request, async.Callback());
    EXPECT_EQ(async.Wait(), absl::OkStatus()) << timeout;
  }
  EXPECT_EQ(limits, 0u) << "what the calls told the server";
  const auto client = ClientOf(server);
  for (const absl::Time past : {absl::InfinitePast(), absl::UnixEpoch()}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(client->GetServerInfo({past, ""}).status())) << past;
    EXPECT_TRUE(absl::IsDeadlineExceeded(client->Attend(r.request, nullptr, {past, ""}))) << past;
  }
}

TEST(LocalClientTest, SurvivesARestartOfTheServer) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  RequestFixture r;
  auto memory = client->CreateSharedMemory(4096);
  ASSERT_EQ(memory.status(), absl::OkStatus());
  r.request.output = {(*memory)->data(), r.query.size()};
  ASSERT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());

  server.Hold(true);  // what is in flight ends at once
  Async in_flight;
  client->AttendAsync(r.request, in_flight.Callback());
  absl::Status blocking;
  std::thread thread([&] {
    RequestFixture other;
    blocking = client->Attend(other.request, nullptr);
  });
  WaitUntil([&] { return server.taken() == 3; });
  server.Stop();
  thread.join();
  EXPECT_EQ(in_flight.Wait().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(blocking.code(), absl::StatusCode::kUnavailable);
  const absl::Status down = client->Attend(r.request, nullptr);
  EXPECT_EQ(down.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(down.message(), HasSubstr(server.path()));
  EXPECT_FALSE((*memory)->registered());

  server.Hold(false);
  server.Start();
  std::fill_n((*memory)->data(), r.query.size(), std::byte{0});
  ASSERT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
  EXPECT_TRUE(std::equal(r.query.begin(), r.query.end(), (*memory)->data()));
  EXPECT_TRUE((*memory)->registered());
  Async again;
  client->AttendAsync(r.request, again.Callback());
  EXPECT_EQ(again.Wait(), absl::OkStatus());
}

TEST(LocalClientTest, RetriesUntilTheServerIsThere) {
  FakeLocalServer server;
  server.Stop();
  RequestFixture blocking, gone;
  AttendResult failed;
  EXPECT_EQ(ClientOf(server, /*max_attempts=*/3)->Attend(blocking.request, &failed).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(failed.attempts, 3);
  const auto client = ClientOf(server, /*max_attempts=*/100'000);
  Async async;
  SendAndDropInputs(client.get(), &gone, &async);
  std::thread thread(
      [&] { EXPECT_EQ(client->Attend(blocking.request, nullptr), absl::OkStatus()); });
  server.Start();
  thread.join();
  EXPECT_EQ(async.Wait(), absl::OkStatus());
  EXPECT_GT(async.result.attempts, 1);
  ExpectRight(blocking);
  ExpectRight(gone);
}

TEST(LocalClientTest, AnAttemptOnANewConnectionCopiesAgain) {
  FakeLocalServer server;
  const auto client = ClientOf(server, /*max_attempts=*/100'000);
  server.Hold(true);
  RequestFixture gone;
  Async async;
  SendAndDropInputs(client.get(), &gone, &async);
  WaitUntil([&] { return server.taken() == 1; });
  server.Stop();
  server.Hold(false);
  server.Start();
  EXPECT_EQ(async.Wait(), absl::OkStatus());
  EXPECT_GT(async.result.attempts, 1);
  ExpectRight(gone);
}

TEST(LocalClientTest, AClientMayGoBeforeItsCalls) {
  FakeLocalServer server;
  server.Hold(true);
  auto client = ClientOf(server);
  RequestFixture r;
  Async async;
  client->AttendAsync(r.request, async.Callback());
  client.reset();
  WaitUntil([&] { return server.taken() == 1; });
  server.Hold(false);
  EXPECT_EQ(async.Wait(), absl::OkStatus());
  ExpectRight(r);
}

TEST(LocalClientTest, TheReasonOfTheServerIsTold) {
  FakeLocalServer server;
  server.on_request = [](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (!request.has_hello()) return false;
    reply->set_id(0);
    *reply->mutable_status() = Code(absl::StatusCode::kPermissionDenied, "the overflow user");
    return true;
  };
  const absl::Status status = ClientOf(server, 4)->Attend(RequestFixture().request, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("the overflow user"));
  EXPECT_EQ(server.connections(), 1);
}

TEST(LocalClientTest, MemoryThatTheServerRefusesIsAnError) {
  FakeLocalServer server;
  server.on_request = [](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (request.register_memory().bytes() <= 1 << 20) return false;
    *reply->mutable_status() = Code(absl::StatusCode::kResourceExhausted, "quota");
    return true;
  };
  const auto client = ClientOf(server);
  EXPECT_EQ(client->CreateSharedMemory(2 << 20).status(), absl::ResourceExhaustedError("quota"));
  EXPECT_EQ(client->Attend(RequestFixture().request, nullptr),
            absl::ResourceExhaustedError("quota"));
}

TEST(LocalClientTest, TargetsAndOptionsThatMakeNoSense) {
  const auto error = [](const std::string& target, const ClientOptions& options = {}) {
    const absl::Status status = Client::Create(target, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(error("local:"), HasSubstr("no path"));
  EXPECT_THAT(error("local:run/s"), HasSubstr("not absolute"));
  EXPECT_THAT(error(absl::StrCat("local:/", std::string(200, 'x'))), HasSubstr("at most 107"));
  ClientOptions token;
  token.token_file = "/nonexistent";
  EXPECT_THAT(error("local:/run/s", token), HasSubstr("user id"));
  ClientOptions tls;
  tls.tls = TlsOptions{"/nonexistent"};
  EXPECT_THAT(error("local:/run/s", tls), HasSubstr("tls: not with the target local:/run/s"));
}

TEST(LocalStreamTest, AnswersInAnyOrderAndInMemory) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  const auto stream = client->OpenStream();
  std::vector<std::unique_ptr<RequestFixture>> requests;
  for (int i = 0; i < 100; ++i) {
    requests.push_back(std::make_unique<RequestFixture>(absl::StrCat(i)));
    ASSERT_EQ(stream->Send(requests.back()->request), absl::OkStatus());
  }
  AttendStream::Answer answer;
  int answers = 0;
  while (stream->Receive(&answer)) {
    EXPECT_EQ(answer.status, absl::OkStatus());
    ++answers;
  }
  EXPECT_EQ(answers, 100);
  for (const auto& r : requests) ExpectRight(*r);
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
  EXPECT_EQ(stream->Send(requests[0]->request).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(LocalStreamTest, RefusesAsOverGrpc) {
  FakeLocalServer server;
  server.Hold(true);
  const auto client = ClientOf(server);
  StreamOptions options;
  options.max_inflight = 2;
  const auto stream = client->OpenStream(options);
  RequestFixture nameless(""), a("a"), b("b"), c("c");
  EXPECT_EQ(stream->Send(nameless.request).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(stream->Send(a.request), absl::OkStatus());
  EXPECT_EQ(stream->Send(a.request).code(), absl::StatusCode::kAlreadyExists);
  ASSERT_EQ(stream->Send(b.request), absl::OkStatus());
  EXPECT_EQ(stream->Send(c.request).code(), absl::StatusCode::kResourceExhausted);
  stream->Cancel();
  AttendStream::Answer answer;
  while (stream->Receive(&answer)) EXPECT_EQ(answer.status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(stream->Send(c.request).code(), absl::StatusCode::kCancelled);
}

TEST(LocalStreamTest, BreaksWithTheConnectionAndWithItsDeadline) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  server.Hold(true);
  const auto stream = client->OpenStream();
  StreamOptions options;
  options.deadline = absl::Now() + absl::Milliseconds(20);
  const auto timed = client->OpenStream(options);
  RequestFixture r("r"), t("t");
  ASSERT_EQ(timed->Send(t.request), absl::OkStatus());
  EXPECT_EQ(timed->Finish().code(), absl::StatusCode::kDeadlineExceeded);
  ASSERT_EQ(stream->Send(r.request), absl::OkStatus());
  server.Stop();
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  server.Start();
  EXPECT_EQ(stream->Send(r.request).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kUnavailable);
  server.Hold(false);
  EXPECT_EQ(client->Attend(r.request, nullptr), absl::OkStatus());
}

TEST(LocalStreamTest, ATimeoutEndsItsRequestAlone) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  OpenBothRings(client.get());
  server.Hold(true);
  StreamOptions options;
  options.timeout = absl::Milliseconds(20);
  const auto stream = client->OpenStream(options);
  RequestFixture r("r"), s("s");
  ASSERT_EQ(stream->Send(r.request), absl::OkStatus());
  AttendStream::Answer answer;
  ASSERT_TRUE(stream->Receive(&answer));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(answer.status.message()),
              HasSubstr("did not answer before the deadline, "));
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("it may have taken effect"));
  EXPECT_EQ(stream->Send(s.request), absl::OkStatus());
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

TEST(LocalStreamTest, ACallbackMaySend) {
  FakeLocalServer server;
  const auto client = ClientOf(server);
  const auto stream = client->OpenStream();
  RequestFixture first("1"), second("2");
  absl::Notification done;
  ASSERT_EQ(stream->Send(first.request,
                         [&](const absl::Status& status, AttendResult) {
                           EXPECT_EQ(status, absl::OkStatus());
                           EXPECT_EQ(
                               stream->Send(second.request,
                                            [&](absl::Status, AttendResult) { done.Notify(); }),
                               absl::OkStatus());
                         }),
            absl::OkStatus());
  done.WaitForNotification();
  EXPECT_EQ(stream->Finish(), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore
