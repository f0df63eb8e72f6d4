// An engine on a fake GPU.
#ifndef FLASHCORE_TESTS_DEVICE_FAKE_GPU_FIXTURE_H_
#define FLASHCORE_TESTS_DEVICE_FAKE_GPU_FIXTURE_H_

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/branches.h"
#include "server/device/cuda_device.h"
#include "server/kv/operation.h"
#include "tests/base/test_seed.h"
#include "tests/device/fake_gpu.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"

namespace flashcore::server::testing {

// Polls until `condition()`. False if that takes longer than any machine should.
template <class Condition>
bool WaitUntil(Condition condition) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::yield();
  }
  return true;
}

inline bool HasEnded(const AttendJob& job) {
  return job.ended.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

// Every stream of GPU `gpu` has `device`'s window: the hot segment, persisting, all else streaming.
inline void ExpectWindows(int gpu, const Device& device) {
  const std::vector<cudaAccessPolicyWindow> windows = FakeGpuWindows(gpu);
  const int streams_of_a_lane = 1 + kernels::Branches::kMost;
  EXPECT_EQ(windows.size(), static_cast<size_t>(device.info().lanes * streams_of_a_lane));
  const KvMemory kv = device.kv_memory();
  for (const cudaAccessPolicyWindow& window : windows) {
    EXPECT_EQ(window.num_bytes, kv.hot_bytes);
    if (kv.hot_bytes == 0) continue;
    EXPECT_EQ(window.base_ptr, kv.base);
    EXPECT_EQ(window.hitRatio, 1.0f);
    EXPECT_EQ(window.hitProp, cudaAccessPropertyPersisting);
    EXPECT_EQ(window.missProp, cudaAccessPropertyStreaming);
    EXPECT_GE(FakeGpuSetAsideBytes(gpu), window.num_bytes) << "for hit ratio 1";
  }
}

class FakeGpuTest : public ::testing::Test {
 protected:
  void Start(const CudaDevice::Options& options, Engine::Options engine_options = {}) {
    engine_options.on_device_lost = [this](const DeviceInfo& device, const absl::Status&) {
      lost_.push_back(device.id);
    };
    engine_ = std::make_unique<Engine>(engine_options, CudaDevice::Create(options).value(), &clock_,
                                       &metrics_);
  }
  ~FakeGpuTest() override { RestoreFakeGpus(); }

  absl::Status Attend(uint32_t query_rows, uint32_t kv_rows) {
    AttendJob job;
    job.operation.request = MakeRequest(query_rows, kv_rows);
    return Attend(&job);
  }

  // Fills the tensors of `job`, whose request is set.
  absl::Status Attend(AttendJob* job) {
    FillTensors(job, &random_);
    if (absl::Status status = Prepare(job, engine_.get()); !status.ok()) return status;
    if (absl::Status status = engine_->Enqueue(&job->operation); !status.ok()) return status;
    absl::Status status = job->ended.get();
    times_ = job->operation.times;
    return status;
  }

  // Admits and queues `job`, whose request is set, with random tensors.
  void Submit(AttendJob* job) {
    FillTensors(job, &random_);
    ASSERT_EQ(Prepare(job, engine_.get()), absl::OkStatus());
    ASSERT_EQ(engine_->Enqueue(&job->operation), absl::OkStatus());
  }

  // Appends `rows` to the sequence, and attends with one query row.
  absl::Status Append(SequenceId id, uint32_t layer, uint32_t rows) {
    AttendJob job;
    job.operation.request = MakeRequest(1, rows);
    job.operation.request.layer = layer;
    job.operation.request.spans[0].sequence_id = id.ToBytes();
    return Attend(&job);
  }

  SteadyClock clock_;
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  std::vector<std::string> lost_;  // device ids; outlives the engine, whose lanes add to it
  std::unique_ptr<Engine> engine_;
  std::mt19937 random_{TestSeed()};
  PhaseTimes times_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_FAKE_GPU_FIXTURE_H_
