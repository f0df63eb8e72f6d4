// Memory of a real GPU that another process could map, and counters that its streams raise.
#include "server/device/cuda_shared_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "server/engine/engine.h"
#include "server/memory/shared_memory.h"
#include "tests/base/test_seed.h"
#include "tests/engine/attend_job.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;

constexpr size_t kMiB = size_t{1} << 20;

class CudaSharedMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status found = CudaDevice::Find(0);
    if (!found.ok()) GTEST_SKIP() << found;
    CudaDevice::Options options;
    options.kv_memory_bytes = 64 * kMiB;
    engine_ = std::make_unique<Engine>(Engine::Options(), CudaDevice::Create(options).value(),
                                       &clock_, &metrics_);
  }
  std::shared_ptr<SharedRegion> OnDevice(size_t bytes) {
    auto memory = engine_->device().AllocateShared(bytes);
    EXPECT_EQ(memory.status(), absl::OkStatus());
    file_ = std::move(memory->file);
    memory->region->set_device(0);
    return std::move(memory->region);
  }

  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"cuda:0", &registry_};
  std::unique_ptr<Engine> engine_;
  FileDescriptor file_;
};

TEST_F(CudaSharedMemoryTest, IsZeroedAndFreeAfterwards) {
  size_t before = 0, with = 0, after = 0, total = 0;
  OnDevice(1);  // the driver's own memory for the first
  file_.reset();
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  {
    const auto region = OnDevice(64 * kMiB);
    ASSERT_EQ(cudaMemGetInfo(&with, &total), cudaSuccess);
    EXPECT_LE(with + 64 * kMiB, before);
    std::vector<std::byte> content(64 * kMiB, std::byte{1});
    ASSERT_EQ(cudaMemcpy(content.data(), region->data(), content.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(content, std::vector<std::byte>(content.size()));
  }
  file_.reset();
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(after, before);
}

TEST_F(CudaSharedMemoryTest, RequestsReadAndWriteItAndTheStreamRaisesTheCounter) {
  const testing::Memfd file(kMiB);
  Gauge bytes, regions;
  SharedMemory memory({}, &engine_->device(), &bytes, &regions);
  const auto host =
      memory.Map(FileDescriptor(dup(file.fd())), kMiB, /*read_only=*/false, "a").value();
  ASSERT_TRUE(host->in_reach());
  const auto region = OnDevice(4 * kMiB);
  std::mt19937 random(TestSeed());
  AttendJob job;
  AttendRequest& request = job.operation.request;
  request = testing::MakeRequest(100, 300, 4, 2, 128);
  FillTensors(&job, &random);
  const size_t sizes[] = {request.query_bytes, request.key_bytes, request.value_bytes,
                          request.output_bytes()};
  for (int i = kQuery; i <= kOutput; ++i) request.ranges[i] = {region, i * kMiB, sizes[i]};
  request.results_ready = {host, 8, 3};
  const std::vector<std::byte>* const inputs[] = {&job.query, &job.key, &job.value};
  for (int i = kQuery; i <= kValue; ++i) {
    ASSERT_EQ(
        cudaMemcpy(region->data() + i * kMiB, inputs[i]->data(), sizes[i], cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  ASSERT_EQ(testing::AdmitNow(engine_.get(), &job.operation), absl::OkStatus());
  EXPECT_EQ(engine_->staging().used_bytes(), 0u);
  ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
  ASSERT_EQ(job.ended.get(), absl::OkStatus());
  EXPECT_TRUE(job.operation.raised_by_device);
  EXPECT_TRUE(request.results_ready.reached());

  // The same from staging memory.
  AttendJob staged;
  staged.operation.request = testing::MakeRequest(100, 300, 4, 2, 128);
  staged.query = job.query;
  staged.key = job.key;
  staged.value = job.value;
  ASSERT_EQ(Prepare(&staged, engine_.get()), absl::OkStatus());
  ASSERT_EQ(engine_->Enqueue(&staged.operation), absl::OkStatus());
  ASSERT_EQ(staged.ended.get(), absl::OkStatus());
  std::vector<std::byte> output(request.output_bytes());
  ASSERT_EQ(cudaMemcpy(output.data(), region->data() + kOutput * kMiB, output.size(),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(std::memcmp(output.data(), staged.operation.tensors.output(), output.size()), 0);
}

}  // namespace
}  // namespace flashcore::server
