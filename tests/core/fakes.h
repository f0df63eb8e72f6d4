// Named stand-ins for the clock and the device.
#ifndef FLASHCORE_TESTS_CORE_FAKES_H_
#define FLASHCORE_TESTS_CORE_FAKES_H_

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/registry.h"
#include "server/core/clock.h"
#include "server/core/device.h"
#include "server/core/mutex.h"
#include "server/core/request.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server::testing {

// Stands still until it is told to advance. Thread-safe.
class FakeClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint(Nanoseconds(now_.load())); }
  void Advance(Nanoseconds duration) { now_ += duration.count(); }

 private:
  std::atomic<int64_t> now_{1'000'000'000};
};

// What a FakeDevice did, and a gate that tests hold it at. Outlives the device.
struct FakeDeviceControl {
  Mutex mutex;
  CondVar changed;
  bool open ABSL_GUARDED_BY(mutex) = true;
  int entered ABSL_GUARDED_BY(mutex) = 0;  // batches that have reached the gate
  std::vector<size_t> batch_sizes ABSL_GUARDED_BY(mutex);
  absl::Status result ABSL_GUARDED_BY(mutex);

  void SetOpen(bool value) {
    MutexLock lock(&mutex);
    open = value;
    changed.NotifyAll();
  }
  void SetResult(absl::Status status) {
    MutexLock lock(&mutex);
    result = std::move(status);
  }
  void WaitUntilEntered(int batches) {
    MutexLock lock(&mutex);
    while (entered < batches) changed.Wait(&mutex);
  }
  std::vector<size_t> BatchSizes() {
    MutexLock lock(&mutex);
    return batch_sizes;
  }
};

// "Attends" by copying Q to O, once its gate is open.
class FakeDevice final : public Device {
 public:
  explicit FakeDevice(FakeDeviceControl* control) : control_(control) {
    info_.id = info_.name = info_.arch = "fake";
    info_.lanes = 1;
    for (const kernels::Kernel& kernel : kernels::AllKernels()) kernels_.push_back(&kernel);
  }

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override { return StagingPool::HeapAllocator(); }

  absl::Status Run(int /*lane*/, absl::Span<AttendOperation* const> batch) override {
    MutexLock lock(&control_->mutex);
    ++control_->entered;
    control_->batch_sizes.push_back(batch.size());
    control_->changed.NotifyAll();
    while (!control_->open) control_->changed.Wait(&control_->mutex);
    for (AttendOperation* operation : batch) {
      std::memcpy(operation->tensors.output(), operation->tensors.query(),
                  operation->request.query_bytes);
    }
    return control_->result;
  }

 private:
  FakeDeviceControl* const control_;
  DeviceInfo info_;
  std::vector<const kernels::Kernel*> kernels_;
};

inline Metrics::Options FakeMetricsOptions(std::vector<RpcMethod> methods = {}) {
  return {"test", {{"fake", "fake", "fake"}}, std::move(methods)};
}

// A valid request of one span.
inline AttendRequest MakeRequest(uint32_t query_rows = 1, uint32_t kv_rows = 1,
                                 uint32_t num_heads = 2, uint32_t num_kv_heads = 1,
                                 uint32_t head_dim = 64) {
  AttendRequest request;
  request.num_heads = num_heads;
  request.num_kv_heads = num_kv_heads;
  request.head_dim = head_dim;
  request.softmax_scale = 0.125f;
  request.spans.resize(1);
  request.spans[0].query_rows = query_rows;
  request.spans[0].kv_rows = kv_rows;
  request.query_bytes = size_t{query_rows} * num_heads * head_dim * 2;
  request.key_bytes = request.value_bytes = size_t{kv_rows} * num_kv_heads * head_dim * 2;
  return request;
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_CORE_FAKES_H_
