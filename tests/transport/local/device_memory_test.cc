// Memory of a device for tensors of clients of the local socket. The device's memory is the host's
// here, and the file that the client gets a memfd.
#include <sys/mman.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/transport/local/setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::kPage;
using testing::kRowBytes;

using testing::LocalClient;
using testing::WaitUntil;

constexpr size_t kMiB = size_t{1} << 20;

class LocalDeviceMemoryTest : public testing::LocalServerTest {
 protected:
  static Server::Options WithMemory(size_t total_bytes) {
    Server::Options options = LocalServerOptions();
    options.device_memory.total_bytes = total_bytes;
    return options;
  }
  static absl::Status Allocate(LocalClient* client, uint64_t bytes, v1::LocalReply* reply,
                               const std::string& device_id = "") {
    v1::LocalRequest request;
    request.mutable_allocate_device_memory()->set_bytes(bytes);
    request.mutable_allocate_device_memory()->set_device_id(device_id);
    return client->Do(request, reply);
  }
  static absl::Status Allocate(LocalClient* client, uint64_t bytes) {
    v1::LocalReply reply;
    return Allocate(client, bytes, &reply);
  }
  bool AllIsFree() const {
    return WaitUntil([&] {
      return metrics_->device_tensor_bytes.Value() == 0 &&
             metrics_->device_tensor_regions.Value() == 0;
    });
  }
};

TEST_F(LocalDeviceMemoryTest, TensorsAreReadAndWrittenThere) {
  StartLocal(WithMemory(8 * kMiB));
  Lane lane(path_);
  v1::LocalReply reply;
  ASSERT_EQ(Allocate(&lane.client, 3 * kPage, &reply), absl::OkStatus());
  const v1::LocalAllocateDeviceMemoryResult& memory = reply.allocate_device_memory();
  EXPECT_GE(memory.bytes(), 3 * kPage);
  EXPECT_EQ(memory.device_uuid(), engine_->device().info().uuid);
  EXPECT_EQ(memory.region_id().size(), 16u);
  const FileDescriptor file = lane.client.TakeFile();
  ASSERT_TRUE(file.valid());
  void* const mapped = mmap(nullptr, 3 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  auto* const data = static_cast<std::byte*>(mapped);
  EXPECT_EQ(data[0], std::byte{0});
  std::memset(data, 0x2a, kRowBytes);
  v1::AttendRequest step = lane.Step(lane.Create());
  const auto place = [&](v1::MemoryRange* range, uint64_t offset) {
    range->set_region_id(memory.region_id());
    range->set_offset(offset);
  };
  place(step.mutable_query_range(), 0);
  place(step.mutable_output_range(), 2 * kPage);
  EXPECT_EQ(lane.Attend(step), absl::OkStatus());
  EXPECT_EQ(std::memcmp(data + 2 * kPage, data, kRowBytes), 0) << "the fake device copies Q to O";
  place(step.mutable_output_range(), memory.bytes());
  EXPECT_THAT(std::string(lane.Attend(step).message()), HasSubstr("output_range.offset"));
  EXPECT_EQ(lane.client.Unregister(memory.region_id()), absl::OkStatus());
  EXPECT_EQ(lane.Attend(step).code(), absl::StatusCode::kNotFound);
  munmap(mapped, 3 * kPage);
  EXPECT_TRUE(AllIsFree());
}

TEST_F(LocalDeviceMemoryTest, TheEndOfTheConnectionFreesIt) {
  StartLocal(WithMemory(8 * kMiB));
  {
    const auto client = Greeted();
    ASSERT_EQ(Allocate(client.get(), kMiB), absl::OkStatus());
    ASSERT_EQ(Allocate(client.get(), kMiB), absl::OkStatus());
    EXPECT_EQ(metrics_->device_tensor_regions.Value(), 2);
    EXPECT_EQ(metrics_->device_tensor_bytes.Value(), 4.0 * kMiB) << "GPUs give pieces of 2 MiB";
  }
  EXPECT_TRUE(AllIsFree());
}

TEST_F(LocalDeviceMemoryTest, IsRefusedUnlessTheServerAllowsIt) {
  StartLocal();
  const auto client = Greeted();
  const absl::Status status = Allocate(client.get(), kMiB);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--local_device_tensors"));
  EXPECT_EQ(client->TakeFile().get(), -1);
}

TEST_F(LocalDeviceMemoryTest, BadRequestsSayWhy) {
  Server::Options options = WithMemory(16 * kMiB);
  options.device_memory.client_bytes = 4 * kMiB;
  options.device_memory.client_regions = 2;
  StartLocal(options);
  const auto client = Greeted(), sibling = Greeted();
  const auto expect = [](const absl::Status& status, absl::StatusCode code, const char* why) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  v1::LocalReply reply;
  expect(Allocate(client.get(), 0), absl::StatusCode::kInvalidArgument, "bytes: 0");
  expect(Allocate(client.get(), 1, &reply, "cuda:7"), absl::StatusCode::kInvalidArgument,
         "device_id: 'cuda:7' is not one of fake");
  expect(Allocate(client.get(), ~uint64_t{0}), absl::StatusCode::kResourceExhausted,
         "in one region");
  expect(Allocate(client.get(), 5 * kMiB), absl::StatusCode::kResourceExhausted, "in one region");
  ASSERT_EQ(Allocate(client.get(), 1), absl::OkStatus());
  ASSERT_EQ(Allocate(sibling.get(), 1), absl::OkStatus());
  expect(Allocate(sibling.get(), 1), absl::StatusCode::kResourceExhausted, "per client");
}

TEST_F(LocalDeviceMemoryTest, ARingIsInHostMemory) {
  StartLocal(WithMemory(8 * kMiB));
  const auto client = Greeted();
  v1::LocalReply reply;
  ASSERT_EQ(Allocate(client.get(), kMiB, &reply), absl::OkStatus());
  v1::LocalRequest ring;
  ring.mutable_open_ring()->set_region_id(reply.allocate_device_memory().region_id());
  ring.mutable_open_ring()->set_slots(1);
  ring.mutable_open_ring()->set_slot_bytes(1024);
  const absl::Status status = client->Do(ring);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a ring is in host memory"));
}

// The client with the most gives back for one that has less.
TEST_F(LocalDeviceMemoryTest, WhoHasTheMostMakesRoom) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become other users";
  Server::Options options = WithMemory(8 * kMiB);
  options.unix_sockets.mode = 0666;
  StartLocal(options);
  const auto large = GreetedAs(2000);
  ASSERT_EQ(Allocate(large.get(), 8 * kMiB), absl::OkStatus());
  const auto small = GreetedAs(2001);
  // The memory that was given back may still be in use for a moment.
  EXPECT_TRUE(WaitUntil([&] { return Allocate(small.get(), kMiB).ok(); }));
  EXPECT_THAT(LastWords(large.get()), HasSubstr("device memory: all clients share too much"));
}

}  // namespace
}  // namespace flashcore::server
