// The local socket against clients whose memory and rings break its rules.
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/wire/ring.h"
#include "server/device/cpu_device.h"
#include "tests/base/test_seed.h"
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

class LocalMemoryFaultsTest : public LocalServerTest {};

// ---- Memory.

TEST_F(LocalMemoryFaultsTest, TakesOnlyMemfdsSealedAgainstShrinking) {
  StartLocal();
  const auto client = Greeted();
  const auto refuses = [&](int file, uint64_t bytes, const char* why) {
    std::string id;
    const absl::Status status = client->Register(file, bytes, &id);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  const Memfd unsealed(kPage, Memfd::Kind::kUnsealed);
  refuses(unsealed.fd(), kPage, "not sealed against shrinking");
  const FileDescriptor huge(memfd_create("huge", MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (huge.valid()) {
    fcntl(huge.get(), F_ADD_SEALS, F_SEAL_SHRINK);
    refuses(huge.get(), kPage, "not a memfd of normal pages");
  }
  const FileDescriptor disk(open(::testing::TempDir().c_str(), O_TMPFILE | O_RDWR, 0600));
  if (disk.valid()) refuses(disk.get(), kPage, "file:");
  const std::string name = absl::StrCat("/flashcore-test-", getpid());
  const FileDescriptor posix(shm_open(name.c_str(), O_CREAT | O_RDWR, 0600));
  shm_unlink(name.c_str());
  ASSERT_EQ(ftruncate(posix.get(), kPage), 0);
  refuses(posix.get(), kPage, "not sealed against shrinking");
  const FileDescriptor event(eventfd(0, 0)), zeros(open("/dev/zero", O_RDWR)),
      folder(open("/dev/shm", O_RDONLY | O_DIRECTORY)), self(open("/proc/self/maps", O_RDONLY));
  for (const FileDescriptor* file : {&event, &zeros, &folder, &self}) {
    refuses(file->get(), kPage, "not a memfd of normal pages");
  }
  refuses(client->fd(), kPage, "not a memfd of normal pages");
  refuses(-1, kPage, "no file descriptor came");
  const Memfd good(4 * kPage);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{100}, kPage + 16, 5 * kPage, ~uint64_t{0}}) {
    refuses(good.fd(), bytes, "is not a multiple of");
  }
  std::string id;
  const FileDescriptor read_only(open(absl::StrCat("/proc/self/fd/", good.fd()).c_str(), O_RDONLY));
  EXPECT_EQ(client->Register(read_only.get(), kPage, &id).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(client->Register(read_only.get(), kPage, &id, /*read_only=*/true), absl::OkStatus());
  EXPECT_EQ(client->Register(good.fd(), 3 * kPage, &id), absl::OkStatus());
}

TEST_F(LocalMemoryFaultsTest, LimitsMemoryOfAUser) {
  Server::Options options = LocalServerOptions();
  options.shared_memory.client_bytes = 8 * kPage;
  options.shared_memory.client_regions = 3;
  StartLocal(options);
  const auto client = Greeted(), sibling = Greeted();
  const Memfd memory(8 * kPage);
  std::string id;
  ASSERT_EQ(client->Register(memory.fd(), 5 * kPage, &id), absl::OkStatus());
  const absl::Status status = sibling->Register(memory.fd(), 4 * kPage, &id);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("at most ", 8 * kPage)));
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(sibling->Register(memory.fd(), kPage, &id), absl::OkStatus());
  EXPECT_EQ(sibling->Register(memory.fd(), kPage, &id).code(),
            absl::StatusCode::kResourceExhausted);
}

// Whether the server has ended the connection to make room for others.
bool MadeRoom(LocalClient* client) {
  v1::LocalRequest request;
  request.set_id(client->NextId());
  request.mutable_unregister_memory()->set_region_id("none");
  client->Send(request);  // which the server may not read any more
  const auto reply = client->Receive();
  EXPECT_TRUE(reply.has_value());
  if (!reply.has_value() || reply->id() != 0) return false;
  EXPECT_EQ(reply->status().code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(reply->status().message(), HasSubstr("all clients share too much together"));
  EXPECT_FALSE(client->Receive().has_value());
  return true;
}

// With the default limits of regions, which are also those of the guards.
TEST_F(LocalMemoryFaultsTest, WhoSharesTheMostMakesRoomForWhoSharesLittle) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become other users";
  Server::Options options = LocalServerOptions();
  options.unix_sockets.mode = 0666;
  StartLocal(options);
  const size_t each = options.shared_memory.client_regions;
  ASSERT_EQ(options.shared_memory.total_regions, 4 * each);
  const Memfd memory(kPage);
  std::string id;
  const auto add = [&](LocalClient* client) { return client->Register(memory.fd(), kPage, &id); };
  const auto small = GreetedAs(2000);
  ASSERT_EQ(add(small.get()), absl::OkStatus());
  std::vector<std::unique_ptr<LocalClient>> large;
  for (uid_t user = 1001; user <= 1004; ++user) {
    large.push_back(GreetedAs(user));
    for (size_t i = 1; i < each; ++i) ASSERT_EQ(add(large.back().get()), absl::OkStatus()) << i;
  }
  for (int i = 0; i < 3; ++i) ASSERT_EQ(add(large[i].get()), absl::OkStatus());
  EXPECT_THAT(add(large[3].get()).message(), HasSubstr("no client has more than this one would"));
  EXPECT_EQ(Refused("shared_memory"), 0);

  const auto fifth = GreetedAs(1005);
  EXPECT_EQ(add(fifth.get()), absl::OkStatus());
  ASSERT_TRUE(testing::WaitUntil([&] { return Refused("shared_memory") == 1; }));
  std::vector<uid_t> ended;
  for (uid_t i = 0; i < 4; ++i) {
    if (MadeRoom(large[i].get())) ended.push_back(1001 + i);
  }
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_FALSE(MadeRoom(small.get()));
  EXPECT_FALSE(MadeRoom(fifth.get()));
  const auto again = GreetedAs(ended[0]);
  EXPECT_EQ(add(again.get()), absl::OkStatus());
  EXPECT_EQ(Refused("shared_memory"), 1);
}

TEST_F(LocalMemoryFaultsTest, MemoryThatIsGivenBackIsMappedUntilItsRequestsEnd) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  Server::Options options = LocalServerOptions();
  options.unix_sockets.mode = 0666;
  options.shared_memory.total_bytes = 100 * kPage;
  StartLocal(options);
  Lane lane(path_);
  gate_.SetOpen(false);
  lane.ring.Submit(1, lane.Step(lane.Create()));
  ASSERT_TRUE(WaitForArrived(1));
  const Memfd memory(60 * kPage);
  std::string id;
  const auto other = GreetedAs(1001);
  EXPECT_EQ(other->Register(memory.fd(), memory.bytes(), &id), absl::OkStatus());
  ASSERT_TRUE(testing::WaitUntil([&] { return Refused("shared_memory") == 1; }));
  EXPECT_TRUE(MadeRoom(&lane.client));
  EXPECT_EQ(metrics_->shared_memory_bytes.Value(), 124 * kPage);
  const auto third = GreetedAs(1002);
  EXPECT_THAT(third->Register(memory.fd(), 50 * kPage, &id).message(),
              HasSubstr("regions that clients had to give back are still in use"));
  gate_.SetOpen(true);
  EXPECT_TRUE(
      testing::WaitUntil([&] { return metrics_->shared_memory_bytes.Value() == 60 * kPage; }));
  EXPECT_EQ(third->Register(memory.fd(), 50 * kPage, &id), absl::OkStatus());
  ASSERT_TRUE(testing::WaitUntil([&] { return Refused("shared_memory") == 2; }));
  EXPECT_TRUE(MadeRoom(other.get()));
}

TEST_F(LocalMemoryFaultsTest, ARegionIsOnlyOfItsConnection) {
  StartLocal();
  Lane lane(path_), other(path_);
  v1::AttendRequest request = lane.Step(lane.Create());
  request.mutable_query_range()->set_region_id(other.region);
  EXPECT_EQ(lane.Attend(request).code(), absl::StatusCode::kNotFound);
  ClientRing ring;
  EXPECT_EQ(ring.Open(&lane.client, other.memory, other.region, 0, 8, 1024).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(lane.client.Unregister(other.region).code(), absl::StatusCode::kNotFound);
  // Nor over gRPC.
  request.clear_output_range();
  v1::AttendResponse response;
  EXPECT_EQ(Attend(request, &response).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(LocalMemoryFaultsTest, RangesStayInTheirRegion) {
  StartLocal();
  Lane lane(path_);
  const std::string id = lane.Create();
  const auto refused = [&](uint64_t offset) {
    v1::AttendRequest request = lane.Step(id);
    request.mutable_output_range()->set_offset(offset);
    return lane.Attend(request).code() == absl::StatusCode::kInvalidArgument;
  };
  const uint64_t end = lane.memory.bytes();
  EXPECT_FALSE(refused(end - kRowBytes));
  for (const uint64_t offset : {end - kRowBytes + 16, end, ~uint64_t{15}, uint64_t{8}}) {
    EXPECT_TRUE(refused(offset)) << offset;
  }
  const Memfd memory(kPage);
  std::string read_only;
  ASSERT_EQ(lane.client.Register(memory.fd(), kPage, &read_only, true), absl::OkStatus());
  v1::AttendRequest request = lane.Step(id);
  request.mutable_output_range()->set_region_id(read_only);
  request.mutable_output_range()->set_offset(0);
  EXPECT_EQ(lane.Attend(request).code(), absl::StatusCode::kInvalidArgument);
}

// With the CPU device: its kernel reads and writes what the client takes away.
TEST_F(LocalMemoryFaultsTest, AHoleReadsAsZeros) {
  path_ = LocalServerOptions().local_listen;
  Server::Options options = LocalServerOptions();
  options.local_listen = path_;
  CpuDevice::Options cpu;
  cpu.threads = 1;
  cpu.kv_memory_bytes = 8 << 20;
  Start(CpuDevice::Create(cpu, clock_).value(), {}, options);
  Lane lane(path_);
  const v1::AttendRequest request = lane.Step(lane.Create());
  ASSERT_EQ(lane.Attend(request), absl::OkStatus());
  std::memset(lane.memory.data() + Lane::kTensors, 0x33, 2 * kPage);
  std::memset(lane.memory.data() + Lane::kOutputs, 0xff, kPage);  // NaN
  const auto punch = [&](uint64_t begin, uint64_t bytes) {
    return fallocate(lane.memory.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(begin), static_cast<off_t>(bytes)) == 0;
  };
  ASSERT_TRUE(punch(Lane::kTensors, kPage));
  ASSERT_TRUE(punch(Lane::kOutputs, kPage));
  v1::AttendResponse response;
  ASSERT_EQ(lane.Attend(request, &response), absl::OkStatus());
  EXPECT_EQ(response.sequence_lengths(0), 2);
  EXPECT_EQ(lane.memory.data()[Lane::kOutputs], std::byte{0});
  EXPECT_NE(ftruncate(lane.memory.fd(), kPage), 0);
  // The ring goes too: its counters are 0 again, which is against the rules.
  ASSERT_TRUE(punch(0, 4 * kPage));
  lane.ring.Submit(1, request);
  ExpectAlive();
}

// ---- Rings.

TEST_F(LocalMemoryFaultsTest, RefusesBadRings) {
  StartLocal();
  const auto client = Greeted();
  const Memfd memory(16 * kPage);
  std::string id, read_only;
  ASSERT_EQ(client->Register(memory.fd(), memory.bytes(), &id), absl::OkStatus());
  ASSERT_EQ(client->Register(memory.fd(), memory.bytes(), &read_only, true), absl::OkStatus());
  const auto open = [&](const std::string& region, uint64_t offset, uint32_t slots,
                        uint32_t slot_bytes) {
    ClientRing ring;
    return ring.Open(client.get(), memory, region, offset, slots, slot_bytes).code();
  };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(open(id, 0, 0, 256), kBad);
  EXPECT_EQ(open(id, 0, 3, 256), kBad);
  EXPECT_EQ(open(id, 0, 8192, 256), kBad);
  EXPECT_EQ(open(id, 0, 1u << 31, 1u << 31), kBad);
  EXPECT_EQ(open(id, 0, 8, 0), kBad);
  EXPECT_EQ(open(id, 0, 8, 192), kBad);
  EXPECT_EQ(open(id, 0, 8, 300), kBad);
  EXPECT_EQ(open(id, 0, 1, 2 << 20), kBad);
  EXPECT_EQ(open(id, 32, 8, 256), kBad);
  EXPECT_EQ(open(id, ~uint64_t{63}, 8, 256), kBad);
  EXPECT_EQ(open(id, 12 * kPage, 32, 256), kBad);  // ends behind the region
  EXPECT_EQ(open(id, 0, 4096, 256), kBad);
  EXPECT_EQ(open(read_only, 0, 8, 256), kBad);
  EXPECT_EQ(open("nonsense", 0, 8, 256), absl::StatusCode::kNotFound);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(open(id, 0, 1, 256), absl::StatusCode::kOk);
  EXPECT_EQ(open(id, 0, 1, 256), absl::StatusCode::kResourceExhausted);
}

TEST_F(LocalMemoryFaultsTest, BrokenCountersEndTheConnection) {
  StartLocal();
  Lane witness(path_);
  const std::string id = witness.Create();
  using Break = std::function<void(wire::RingHeader*)>;
  const std::vector<Break> breaks = {
      [](auto* header) { header->submitted = 10; },  // 1 was answered, and 8 fit
      [](auto* header) { header->submitted = 0; },
      [](auto* header) { header->submitted = ~uint64_t{0}; },
      [](auto* header) { header->received = 2, header->submitted = 2; },
      [](auto* header) { header->received = 0, header->submitted = 9; },
      [](auto* header) { header->received = ~uint64_t{0}, header->submitted = 2; },
  };
  for (const Break& break_it : breaks) {
    Lane lane(path_);
    ASSERT_EQ(lane.Attend(lane.Step(lane.Create())), absl::OkStatus());
    break_it(lane.ring.header());
    eventfd_write(lane.ring.doorbell(), 1);
    EXPECT_THAT(LastWords(&lane.client), HasSubstr("ring: the counter"));
    EXPECT_EQ(witness.Attend(witness.Step(id)), absl::OkStatus());
  }
}

TEST_F(LocalMemoryFaultsTest, ASlotLargerThanASlotEndsTheConnection) {
  StartLocal();
  Lane lane(path_);
  const wire::SubmissionSlot header = {7, 0, 1024 - sizeof(wire::SubmissionSlot) + 1, 0};
  std::memcpy(lane.ring.SubmissionSlot(0), &header, sizeof(header));
  lane.ring.header()->submitted = 1;
  eventfd_write(lane.ring.doorbell(), 1);
  EXPECT_THAT(LastWords(&lane.client), HasSubstr("it has room for 1000"));
  ExpectAlive();
}

TEST_F(LocalMemoryFaultsTest, GarbageInSlotsIsAnsweredWithErrors) {
  StartLocal();
  Lane lane(path_);
  std::mt19937 random(TestSeed());
  // Not the region of the ring, whose counters a garbled output_range could overwrite.
  const Memfd tensors(64 * kPage);
  std::string region;
  ASSERT_EQ(lane.client.Register(tensors.fd(), tensors.bytes(), &region), absl::OkStatus());
  v1::AttendRequest step = lane.Step(lane.Create());
  for (v1::MemoryRange* range : {step.mutable_query_range(), step.mutable_key_range(),
                                 step.mutable_value_range(), step.mutable_output_range()}) {
    range->set_region_id(region);
  }
  const std::string good = step.SerializeAsString();
  for (int i = 0; i < 2000; ++i) {
    std::string message = good;
    if (i % 2 == 0) message.resize(random() % 1000);
    for (unsigned n = random() % 8; n > 0 && !message.empty(); --n) {
      message[random() % message.size()] = static_cast<char>(random());
    }
    lane.ring.Submit(i, message);
    uint64_t tag = 0;
    v1::AttendResponse response;
    ASSERT_TRUE(lane.ring.Receive(&tag, &response));
    ASSERT_EQ(tag, i);
  }
  ExpectAlive();
}

TEST_F(LocalMemoryFaultsTest, ReservedBitsMustBeZero) {
  StartLocal();
  Lane lane(path_);
  const wire::SubmissionSlot header = {7, 0, 0, 1};
  std::memcpy(lane.ring.SubmissionSlot(0), &header, sizeof(header));
  lane.ring.header()->submitted = 1;
  eventfd_write(lane.ring.doorbell(), 1);
  uint64_t tag = 0;
  v1::AttendResponse response;
  ASSERT_TRUE(lane.ring.Receive(&tag, &response));
  EXPECT_THAT(response.status().message(), HasSubstr("reserved"));
}

TEST_F(LocalMemoryFaultsTest, AClientThatDoesNotReceiveStopsOnlyItself) {
  StartLocal();
  Lane lane(path_);
  const v1::AttendRequest request = lane.Step(lane.Create());
  for (int i = 0; i < 8; ++i) lane.ring.Submit(i, request);
  ASSERT_TRUE(testing::WaitUntil([&] { return lane.ring.header()->completed == 8; }));
  ExpectAlive();
  uint64_t tag = 0;
  v1::AttendResponse response;
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(lane.ring.Receive(&tag, &response));
    EXPECT_EQ(response.status().message(), "");
  }
  EXPECT_EQ(lane.Attend(request), absl::OkStatus());
  // One more than the ring holds is against the rules.
  for (int i = 0; i < 9; ++i) lane.ring.Submit(i, request);
  LastWords(&lane.client);
}

TEST_F(LocalMemoryFaultsTest, TheDoorbellMayBeRungAtAnyTime) {
  StartLocal();
  Lane lane(path_);
  const v1::AttendRequest request = lane.Step(lane.Create());
  for (int i = 0; i < 100; ++i) {
    eventfd_write(lane.ring.doorbell(), 1);
    if (i == 50) eventfd_write(lane.ring.doorbell(), ~uint64_t{0} - 1000);  // nearly its maximum
    ASSERT_EQ(lane.Attend(request), absl::OkStatus());
  }
}

}  // namespace
}  // namespace flashcore::server
