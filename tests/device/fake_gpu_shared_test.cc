// Tensors in memory of a GPU that clients share, and the counters of their streams, on a fake GPU.
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "server/memory/shared_memory.h"
#include "tests/device/fake_gpu.h"
#include "tests/device/fake_gpu_fixture.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using kernels::Accumulate;
using testing::AttendJob;
using ::testing::HasSubstr;
using testing::SmallOptions;

constexpr size_t kMiB = size_t{1} << 20;
constexpr uint64_t kStep = 64 << 10;  // between tensors

using Counter = std::atomic<uint64_t>;

class FakeGpuSharedTest : public testing::FakeGpuTest {
 protected:
  // Memory of the engine's GPU.
  std::shared_ptr<SharedRegion> OnDevice(size_t bytes = kMiB) {
    auto memory = engine_->device().AllocateShared(bytes);
    EXPECT_EQ(memory.status(), absl::OkStatus());
    memory->region->set_device(0);
    return std::move(memory->region);
  }
  // A region of a client's host memory, pinned, at whose start counters are.
  std::shared_ptr<const SharedRegion> Pinned() {
    return memory_->Map(FileDescriptor(dup(file_.fd())), file_.bytes(), /*read_only=*/false, "a")
        .value();
  }
  Counter& counter(uint64_t offset) const {
    return *reinterpret_cast<Counter*>(file_.data() + offset);
  }
  void StartWithMemory(const CudaDevice::Options& options, Engine::Options engine = {}) {
    Start(options, std::move(engine));
    memory_ = std::make_unique<SharedMemory>(SharedMemory::Options(), &engine_->device(), &bytes_,
                                             &regions_);
  }
  static void Place(Tensor tensor, const std::shared_ptr<const SharedRegion>& region, size_t bytes,
                    AttendRequest* request) {
    request->ranges[tensor] = {region, kStep * tensor, bytes};
  }
  static void PlaceAll(const std::shared_ptr<const SharedRegion>& region, AttendRequest* request) {
    Place(kQuery, region, request->query_bytes, request);
    Place(kKey, region, request->key_bytes, request);
    Place(kValue, region, request->value_bytes, request);
    Place(kOutput, region, request->output_bytes(), request);
    if (request->return_lse) Place(kLse, region, request->lse_bytes(), request);
  }
  static std::string Difference(const AttendJob& job) {
    return FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16));
  }

  const testing::Memfd file_{kMiB};
  Gauge bytes_, regions_;
  std::unique_ptr<SharedMemory> memory_;
};

TEST_F(FakeGpuSharedTest, MemoryIsZeroedAndTheClientsFileIsTheSame) {
  StartWithMemory(SmallOptions());
  {
    auto memory = engine_->device().AllocateShared(1);
    ASSERT_EQ(memory.status(), absl::OkStatus());
    EXPECT_EQ(memory->region->bytes(), 2 * kMiB);
    EXPECT_TRUE(memory->region->in_reach());
    struct stat status;
    ASSERT_EQ(fstat(memory->file.get(), &status), 0);
    EXPECT_EQ(status.st_size, static_cast<off_t>(2 * kMiB));
    void* const mapped =
        mmap(nullptr, 2 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, memory->file.get(), 0);
    ASSERT_NE(mapped, MAP_FAILED);
    memory->region->data()[5] = std::byte{7};
    EXPECT_EQ(static_cast<std::byte*>(mapped)[5], std::byte{7});
    EXPECT_EQ(static_cast<std::byte*>(mapped)[6], std::byte{0});
    munmap(mapped, 2 * kMiB);
    EXPECT_GT(testing::FakeGpuSharedResources(), 0);
  }
  EXPECT_EQ(testing::FakeGpuSharedResources(), 0);
}

TEST_F(FakeGpuSharedTest, AFailedAllocationLeavesNothing) {
  StartWithMemory(SmallOptions());
  int calls = 0;  // that succeed
  while (true) {
    testing::FailFakeGpuDriver(true, calls);
    const auto memory = engine_->device().AllocateShared(kMiB);
    testing::FailFakeGpuDriver(false);
    if (memory.ok()) break;
    EXPECT_THAT(std::string(memory.status().message()), HasSubstr("a fake driver's error"));
    EXPECT_EQ(testing::FakeGpuSharedResources(), 0) << "after " << calls << " calls";
    ++calls;
  }
  EXPECT_EQ(calls, 6) << "granularity, create, reserve, map, access, export";
  const auto too_large = engine_->device().AllocateShared(size_t{1} << 40);
  EXPECT_EQ(too_large.status().code(), absl::StatusCode::kResourceExhausted);
}

// Nothing is copied: neither tensors, however large, nor staged.
TEST_F(FakeGpuSharedTest, TensorsAreReadAndWrittenInPlace) {
  for (const size_t direct_io_bytes : {size_t{0}, kMiB}) {
    CudaDevice::Options options = SmallOptions();
    options.direct_io_bytes = direct_io_bytes;
    StartWithMemory(options);
    AttendJob job;
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(40, 300);
    request.return_lse = true;
    PlaceAll(OnDevice(), &request);
    const int copies = testing::FakeGpuCopies();
    ASSERT_EQ(Attend(&job), absl::OkStatus());
    EXPECT_EQ(testing::FakeGpuCopies(), copies);
    EXPECT_EQ(engine_->staging().used_bytes(), 0u);
    EXPECT_EQ(Difference(job), "");
  }
}

// Each subset of the tensors on the device, the others in staging memory or in a client's.
TEST_F(FakeGpuSharedTest, OtherTensorsAreCopiedAsEver) {
  for (const bool in_parts : {false, true}) {
    for (const bool staged : {true, false}) {
      CudaDevice::Options options = SmallOptions();
      options.direct_io_bytes = 0;
      Engine::Options engine;
      if (in_parts) engine.batcher.max_launch = Nanoseconds(1);
      StartWithMemory(options, engine);
      const std::shared_ptr<SharedRegion> on_device = OnDevice();
      const std::shared_ptr<const SharedRegion> host = Pinned();
      for (int subset = 0; subset < 1 << kNumTensors; ++subset) {
        AttendJob job;
        AttendRequest& request = job.operation.request;
        request = testing::MakeRequest(200, 100);
        request.return_lse = true;
        if (!staged) PlaceAll(host, &request);
        const AttendRequest other = request;
        PlaceAll(on_device, &request);
        for (int i = 0; i < kNumTensors; ++i) {
          if ((subset >> i & 1) == 0) request.ranges[i] = other.ranges[i];
        }
        std::memset(on_device->data(), 0xff, on_device->bytes());
        ASSERT_EQ(Attend(&job), absl::OkStatus());
        EXPECT_EQ(Difference(job), "") << "subset " << subset << " in_parts " << in_parts;
      }
    }
  }
}

TEST_F(FakeGpuSharedTest, RequestsOfALaunchMayBeOnBothSides) {
  CudaDevice::Options options = SmallOptions();
  options.lanes = 1;
  StartWithMemory(options);
  testing::HoldFakeGpu(0, true);
  AttendJob first, jobs[4];
  first.operation.request = testing::MakeRequest();
  Submit(&first);
  ASSERT_TRUE(testing::WaitUntil([] { return testing::FakeGpuWaitingPieces(0) > 0; }));
  const std::shared_ptr<SharedRegion> on_device = OnDevice(4 * kMiB);
  for (int i = 0; i < 4; ++i) {
    AttendRequest& request = jobs[i].operation.request;
    request = testing::MakeRequest(3, 50);
    if (i % 2 == 0) {
      PlaceAll(on_device, &request);
      for (MemoryRange& range : request.ranges) range.offset += 8 * kStep * i;
      request.ranges[kLse] = {};
    }
    Submit(&jobs[i]);
  }
  const int launches = testing::FakeGpuLaunches(Accumulate::kFloat32);
  testing::HoldFakeGpu(0, false);
  for (AttendJob& job : jobs) {
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    EXPECT_EQ(Difference(job), "");
  }
  EXPECT_EQ(testing::FakeGpuLaunches(Accumulate::kFloat32) - launches, 1) << "one batch";
}

TEST_F(FakeGpuSharedTest, TheStreamRaisesTheCounterBehindTheResults) {
  StartWithMemory(SmallOptions());
  const auto region = Pinned();
  AttendJob job;
  job.operation.request = testing::MakeRequest();
  job.operation.request.results_ready = {region, 64, 9};
  testing::HoldFakeGpu(0, true);
  Submit(&job);
  ASSERT_TRUE(testing::WaitUntil([] { return testing::FakeGpuWaitingPieces(0) >= 2; }));
  EXPECT_EQ(counter(64), 0u);
  testing::HoldFakeGpu(0, false);
  ASSERT_EQ(job.ended.get(), absl::OkStatus());
  EXPECT_TRUE(job.operation.raised_by_device);
  EXPECT_EQ(counter(64), 9u);
  EXPECT_EQ(Difference(job), "");
}

TEST_F(FakeGpuSharedTest, ALongLaunchRaisesItsCounterOnceAtItsEnd) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;  // several passes
  Engine::Options in_parts;
  in_parts.batcher.max_launch = Nanoseconds(1);
  StartWithMemory(options, in_parts);
  const auto region = Pinned();
  AttendJob job;
  job.operation.request = testing::MakeRequest(500, 200);
  job.operation.request.results_ready = {region, 8, 1};
  const int launches = testing::FakeGpuLaunches(Accumulate::kFloat32);
  testing::HoldFakeGpu(0, true);
  Submit(&job);
  ASSERT_TRUE(testing::WaitUntil([] { return testing::FakeGpuWaitingPieces(0) > 0; }));
  testing::HoldFakeGpu(0, false);
  uint64_t seen = 0;
  while (!testing::HasEnded(job)) seen = std::max(seen, counter(8).load());
  EXPECT_LE(seen, 1u);
  EXPECT_GE(testing::FakeGpuLaunches(Accumulate::kFloat32) - launches, 2) << "parts";
  EXPECT_EQ(counter(8), 1u);
  EXPECT_EQ(Difference(job), "");
}

// Nobody has pinned it, or the driver refuses: the host raises it.
TEST_F(FakeGpuSharedTest, CountersOutOfReachAreLeftToTheHost) {
  StartWithMemory(SmallOptions());
  AttendJob job;
  job.operation.request = testing::MakeRequest();
  job.operation.request.results_ready = {file_.Map(), 8, 1};
  ASSERT_EQ(Attend(&job), absl::OkStatus());
  EXPECT_FALSE(job.operation.raised_by_device);
  EXPECT_EQ(counter(8), 0u) << "which the transport does";
  AttendJob refused;
  refused.operation.request = testing::MakeRequest();
  refused.operation.request.results_ready = {Pinned(), 8, 1};
  testing::FailFakeGpuDriver(true);
  EXPECT_EQ(Attend(&refused).code(), absl::StatusCode::kInternal);
  testing::FailFakeGpuDriver(false);
  EXPECT_EQ(Attend(3, 5), absl::OkStatus()) << "the lane goes on";
}

// A client's memory is gone only when the launch that uses it has ended.
TEST_F(FakeGpuSharedTest, MemoryStaysUntilItsLastUse) {
  StartWithMemory(SmallOptions());
  AttendJob job;
  job.operation.request = testing::MakeRequest(3, 50);
  PlaceAll(OnDevice(), &job.operation.request);
  testing::HoldFakeGpu(0, true);
  Submit(&job);
  ASSERT_TRUE(testing::WaitUntil([] { return testing::FakeGpuWaitingPieces(0) > 0; }));
  EXPECT_GT(testing::FakeGpuSharedResources(), 0);
  testing::HoldFakeGpu(0, false);
  ASSERT_EQ(job.ended.get(), absl::OkStatus());
  EXPECT_EQ(Difference(job), "");
  job.operation.request = AttendRequest();
  EXPECT_EQ(testing::FakeGpuSharedResources(), 0);
}

}  // namespace
}  // namespace flashcore::server
