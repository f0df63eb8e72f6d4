// Memory of a GPU in the C interface.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "tests/client/c_device_fixture.h"

namespace flashcore {
namespace {

using testing::HasSubstr;

std::string Id(const flashcore_device_memory& memory) {
  return {reinterpret_cast<const char*>(memory.region_id), sizeof(memory.region_id)};
}

TEST_F(CDeviceTest, GivesMemoryOfTheServersGpu) {
  v1::LocalAllocateDeviceMemory asked;
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_allocate_device_memory()) asked = request.allocate_device_memory();
    return false;
  };
  Connect();
  flashcore_device_memory memory;
  ASSERT_EQ(flashcore_allocate_device_memory(client_, 100, "cuda:0", kTimeout, &memory),
            FLASHCORE_OK)
      << flashcore_last_error();
  EXPECT_EQ(asked.device_id(), "cuda:0");
  EXPECT_EQ(asked.bytes(), 100u);
  EXPECT_EQ(memory.bytes, FAKE_CUDA_GRANULARITY) << "all that the server gave";
  EXPECT_EQ(memory.ordinal, 0);
  EXPECT_EQ(server_.regions(), 2u);
  auto* const data = reinterpret_cast<char*>(memory.address);
  EXPECT_EQ(std::string(data, memory.bytes), std::string(memory.bytes, '\0'));
  std::memset(data, 1, memory.bytes);
  EXPECT_EQ(fake_cuda_alive("imports"), 0) << "the mapping keeps it";

  flashcore_device_memory other;
  ASSERT_EQ(Allocate(FAKE_CUDA_GRANULARITY + 1, &other), FLASHCORE_OK);
  EXPECT_EQ(asked.device_id(), "");
  EXPECT_EQ(other.bytes, 2 * FAKE_CUDA_GRANULARITY);
  EXPECT_NE(Id(other), Id(memory));
  EXPECT_EQ(fake_cuda_alive("maps"), 2);

  EXPECT_EQ(flashcore_unregister_memory(client_, memory.region_id), FLASHCORE_OK);
  EXPECT_EQ(fake_cuda_alive("maps"), 1);
  EXPECT_EQ(fake_cuda_alive("reservations"), 1);
  WaitForRegions(2);
  EXPECT_EQ(flashcore_unregister_memory(client_, memory.region_id), kNotFound);
}  // closing the client frees the other one

TEST_F(CDeviceTest, MemoryStaysMappedAfterTheEnd) {
  Connect();
  flashcore_device_memory memory;
  ASSERT_EQ(Allocate(1, &memory), FLASHCORE_OK);
  server_.Stop();
  WaitFor([&] { return flashcore_ended(client_) == 1; });
  std::memset(reinterpret_cast<void*>(memory.address), 1, memory.bytes);
  EXPECT_EQ(Allocate(1, &memory), kUnavailable);
  EXPECT_EQ(flashcore_unregister_memory(client_, memory.region_id), FLASHCORE_OK);
  EXPECT_EQ(fake_cuda_alive("maps"), 0);
}

TEST_F(CDeviceTest, FindsTheGpuByItsUuid) {
  const uint8_t uuids[] = "other GPU no. 00fake GPU no. 000";
  fake_cuda_set_gpus(2, uuids);
  Connect();
  flashcore_device_memory memory;
  ASSERT_EQ(Allocate(1, &memory), FLASHCORE_OK) << flashcore_last_error();
  EXPECT_EQ(memory.ordinal, 1);
}

TEST_F(CDeviceTest, AGpuThatTheProcessDoesNotSeeIsRefused) {
  server_.device_uuid =
      std::string("\x01\x23\x45\x67\x89\xab\xcd\xef\x00\x00\x00\x00\x00\x00\x00\xff", 16);
  Connect();
  flashcore_device_memory memory;
  EXPECT_EQ(Allocate(1, &memory), kFailedPrecondition);
  EXPECT_THAT(flashcore_last_error(), HasSubstr("GPU-01234567-89ab-cdef-0000-0000000000ff"));
  EXPECT_THAT(flashcore_last_error(),
              HasSubstr("it sees GPU-66616b65-2047-5055-206e-6f2e20303030"));
  WaitForRegions(1);
  fake_cuda_set_gpus(0, nullptr);
  EXPECT_EQ(Allocate(1, &memory), kFailedPrecondition);
  EXPECT_THAT(flashcore_last_error(), HasSubstr("no GPU"));
  WaitForRegions(1);
}

TEST_F(CDeviceTest, AFailureOfTheDriverLeavesNothing) {
  Connect();
  flashcore_device_memory memory;
  for (const std::string function :
       {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap",
        "cuMemSetAccess"}) {
    fake_cuda_fail(function.c_str(), 0, 999);
    EXPECT_EQ(Allocate(1, &memory), kInternal) << function;
    EXPECT_EQ(flashcore_last_error(), function + ": unknown error");
    WaitForRegions(1);
    for (const char* kind : {"contexts", "current", "imports", "reservations", "maps"}) {
      EXPECT_EQ(fake_cuda_alive(kind), 0) << function << ", " << kind;
    }
  }
  EXPECT_EQ(Allocate(1, &memory), FLASHCORE_OK) << flashcore_last_error();
}

TEST_F(CDeviceTest, ErrorsOfTheDriverHaveTheirCodes) {
  Connect();
  flashcore_device_memory memory;
  const struct {
    int result, code;
    std::string message;
  } kCases[] = {{2, kResourceExhausted, "cuMemMap: out of memory"},
                {3, kFailedPrecondition, "CUDA does not survive a fork"},
                {801, kUnimplemented, "cuMemMap: operation not supported"},
                {12345, kInternal, "cuMemMap: error 12345"}};
  for (const auto& expected : kCases) {
    fake_cuda_fail("cuMemMap", 0, expected.result);
    EXPECT_EQ(Allocate(1, &memory), expected.code);
    EXPECT_THAT(flashcore_last_error(), HasSubstr(expected.message));
  }
}

TEST_F(CDeviceTest, TheServersRefusalIsTold) {
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (!request.has_allocate_device_memory()) return false;
    reply->mutable_status()->set_code(kUnimplemented);
    reply->mutable_status()->set_message("no --local_device_tensors");
    return true;
  };
  Connect();
  flashcore_device_memory memory;
  EXPECT_EQ(Allocate(1, &memory), kUnimplemented);
  EXPECT_THAT(flashcore_last_error(), HasSubstr("no --local_device_tensors"));
}

TEST_F(CDeviceTest, MalformedRepliesLeaveNothing) {
  v1::LocalAllocateDeviceMemoryResult result;  // without a file
  std::vector<std::string> unregistered;
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply* reply) {
    if (request.has_unregister_memory()) {
      unregistered.push_back(request.unregister_memory().region_id());
    }
    if (!request.has_allocate_device_memory()) return false;
    *reply->mutable_allocate_device_memory() = result;
    return true;
  };
  Connect();
  const auto expect = [&](const std::string& problem) {
    flashcore_device_memory memory;
    EXPECT_EQ(Allocate(100, &memory), kInternal);
    EXPECT_EQ(flashcore_last_error(), "reply: " + problem);
  };
  expect("a region_id of 0 bytes");
  result.set_region_id("region 123456789");
  expect("a device_uuid of 0 bytes");
  result.set_device_uuid(server_.device_uuid);
  result.set_bytes(99);
  expect("99 bytes of device memory, for 100");
  result.set_bytes(100);
  expect("device memory without a file descriptor");
  server_.Stop();  // all that was told has been read
  EXPECT_EQ(unregistered, std::vector<std::string>(3, "region 123456789"));
}

// Else memory of the GPU would be lost until the connection ends.
TEST_F(CDeviceTest, MemoryThatComesTooLateIsGivenBack) {
  absl::Notification too_late;
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_allocate_device_memory() || request.register_memory().bytes() == 4096) {
      too_late.WaitForNotification();
    }
    return false;
  };
  Connect();
  flashcore_device_memory memory;
  flashcore_memory host;
  EXPECT_EQ(flashcore_allocate_device_memory(client_, 1, "", 1, &memory), kDeadlineExceeded);
  EXPECT_EQ(flashcore_register_memory(client_, 1, 0, 1, &host), kDeadlineExceeded);
  too_late.Notify();
  flashcore_bytes response;
  EXPECT_EQ(flashcore_call(client_, "GetServerInfo", nullptr, 0, kTimeout, &response),
            kUnimplemented);
  WaitForRegions(1);
}

TEST_F(CDeviceTest, BadArgumentsSendNothing) {
  std::atomic<int> requests{0};
  server_.on_request = [&](const v1::LocalRequest& request, v1::LocalReply*) {
    if (request.has_allocate_device_memory()) ++requests;
    return false;
  };
  Connect();
  flashcore_device_memory memory;
  EXPECT_EQ(Allocate(0, &memory), kInvalidArgument);
  EXPECT_EQ(Allocate(1, nullptr), kInvalidArgument);
  EXPECT_EQ(flashcore_allocate_device_memory(nullptr, 1, "", kTimeout, &memory), kInvalidArgument);
  EXPECT_EQ(flashcore_allocate_device_memory(client_, 1, "", 0, &memory), kDeadlineExceeded);
  ASSERT_EQ(Allocate(1, &memory), FLASHCORE_OK);
  EXPECT_EQ(requests, 1);
}

TEST_F(CDeviceTest, AChildThatWasForkedIsRefused) {
  Connect();
  flashcore_device_memory memory;
  ASSERT_EQ(Allocate(1, &memory), FLASHCORE_OK);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        Allocate(1, &memory) == kFailedPrecondition &&
        flashcore_unregister_memory(client_, memory.region_id) == kFailedPrecondition &&
        flashcore_submit_on_stream(client_, 1, nullptr, 0, kTimeout, nullptr) ==
            kFailedPrecondition;
    flashcore_close(client_);
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::memset(reinterpret_cast<void*>(memory.address), 1, memory.bytes);
  EXPECT_EQ(flashcore_unregister_memory(client_, memory.region_id), FLASHCORE_OK);
}

}  // namespace
}  // namespace flashcore
