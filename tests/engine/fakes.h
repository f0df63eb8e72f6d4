// Fakes of the device.
#ifndef FLASHCORE_TESTS_ENGINE_FAKES_H_
#define FLASHCORE_TESTS_ENGINE_FAKES_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kv_pages.h"
#include "kernels/registry.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/device/device.h"
#include "server/kv/operation.h"
#include "server/request/request.h"
#include "server/telemetry/metrics.h"
#include "tests/base/fake_clock.h"

namespace flashcore::server::testing {

// A record of what a FakeDevice did, and a gate that holds it. Outlives the device.
struct FakeDeviceControl {
  Mutex mutex;
  CondVar changed;
  bool open ABSL_GUARDED_BY(mutex) = true;
  int entered ABSL_GUARDED_BY(mutex) = 0;            // batches that have been started
  size_t most_under_way ABSL_GUARDED_BY(mutex) = 0;  // of a lane
  std::vector<size_t> batch_sizes ABSL_GUARDED_BY(mutex);
  std::vector<std::string> clients ABSL_GUARDED_BY(mutex);  // of the first request of each batch
  std::vector<size_t> appends ABSL_GUARDED_BY(mutex);       // of each batch
  absl::Status result ABSL_GUARDED_BY(mutex);
  int passes ABSL_GUARDED_BY(mutex) = 0;         // batches that may pass the closed gate
  size_t given_back ABSL_GUARDED_BY(mutex) = 0;  // bytes of K/V memory

  void SetOpen(bool value) {
    MutexLock lock(&mutex);
    open = value;
    changed.NotifyAll();
  }
  void PassOne() {
    MutexLock lock(&mutex);
    ++passes;
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
  std::vector<std::string> Clients() {
    MutexLock lock(&mutex);
    return clients;
  }
  std::vector<size_t> Appends() {
    MutexLock lock(&mutex);
    return appends;
  }
  void GiveBack(size_t bytes) {
    MutexLock lock(&mutex);
    given_back += bytes;
    changed.NotifyAll();
  }
  void WaitUntilGivenBack(size_t bytes) {
    MutexLock lock(&mutex);
    while (given_back < bytes) changed.Wait(&mutex);
  }
  size_t MostUnderWay() {
    MutexLock lock(&mutex);
    return most_under_way;
  }
};

// The part of a launch that writes K/V, and page moves, as on a CPU.
inline void WritePages(const Launch& launch) {
  const kernels::PageLayout layout = launch.page_layout();
  kernels::CopyPagesCpu(layout.page_bytes(), launch.copies.data(),
                        static_cast<int32_t>(launch.copies.size()), nullptr);
  kernels::AppendRowsCpu(layout, launch.appends.data(), static_cast<int32_t>(launch.appends.size()),
                         nullptr);
}
inline void CopyPages(const PageMoves& moves) {
  for (const PageMoves::Group& group : moves.groups) {
    kernels::CopyPagesCpu(group.page_bytes, group.copies.data(),
                          static_cast<int32_t>(group.copies.size()), nullptr);
  }
}

// A device with its K/V pages on the heap, poisoned with NaN.
class HeapDevice : public Device {
 public:
  struct Options {
    std::string id = "fake";
    int lanes = 1;
    size_t kv_memory_bytes = size_t{1} << 20;
    size_t kv_hot_bytes = 0;
  };

  explicit HeapDevice(const Options& options)
      : kv_(static_cast<std::byte*>(std::aligned_alloc(64, options.kv_memory_bytes))),
        kv_memory_{kv_.get(), options.kv_memory_bytes, options.kv_hot_bytes} {
    info_.id = options.id;
    info_.name = info_.arch = "fake";
    info_.uuid = "a UUID for tests.";
    info_.uuid.resize(16);
    info_.lanes = options.lanes;
    for (const kernels::Kernel& kernel : kernels::AllKernels()) {
      if (kernel.spec.arch == kernels::Arch::kCpu) kernels_.push_back(&kernel);
    }
    std::memset(kv_.get(), 0xff, options.kv_memory_bytes);
  }

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return kernels_; }
  StagingPool::Allocator staging_allocator() override { return StagingPool::HeapAllocator(); }
  KvMemory kv_memory() const override { return kv_memory_; }

  // A memfd of the host, which both map.
  absl::StatusOr<SharedMemory> AllocateShared(size_t bytes) const override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    FileDescriptor file(memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (ftruncate(file.get(), static_cast<off_t>(whole)) != 0) std::abort();
    auto region = SharedRegion::Map(file, whole, /*read_only=*/false);
    if (!region.ok()) return region.status();
    return SharedMemory{*std::move(region), std::move(file)};
  }

  // For devices that do everything in Dispatch.
  absl::Status Complete(int /*lane*/) override { return absl::OkStatus(); }
  absl::Status CopyPages(int /*lane*/, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override {
    kernels::CopyPagesCpu(page_bytes, copies.data(), static_cast<int32_t>(copies.size()), nullptr);
    return absl::OkStatus();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  const std::unique_ptr<std::byte, Free> kv_;
  const KvMemory kv_memory_;
  DeviceInfo info_;
  std::vector<const kernels::Kernel*> kernels_;
};

// Copies Q to O instead of attending, in Wait, once its gate is open.
class FakeDevice final : public HeapDevice {
 public:
  explicit FakeDevice(FakeDeviceControl* control) : FakeDevice(control, Options()) {}
  FakeDevice(FakeDeviceControl* control, const Options& options)
      : HeapDevice(options), control_(control) {}

  // Memory that is given back is poisoned again.
  KvMemory kv_memory() const override {
    KvMemory memory = HeapDevice::kv_memory();
    memory.give_back = [control = control_](std::byte* data, size_t bytes) {
      std::memset(data, 0xff, bytes);
      control->GiveBack(bytes);
    };
    return memory;
  }

  absl::Status Dispatch(int lane, const Launch& launch) override {
    WritePages(launch);
    MutexLock lock(&control_->mutex);
    under_way_[lane].push_back(&launch);
    control_->most_under_way = std::max(control_->most_under_way, under_way_[lane].size());
    ++control_->entered;
    control_->batch_sizes.push_back(launch.operations.size());
    control_->clients.push_back(launch.operations.front()->identity.name);
    control_->appends.push_back(launch.appends.size());
    control_->changed.NotifyAll();
    return absl::OkStatus();
  }

  absl::Status Complete(int lane) override {
    MutexLock lock(&control_->mutex);
    while (!control_->open && control_->passes == 0) control_->changed.Wait(&control_->mutex);
    if (!control_->open) --control_->passes;
    const Launch& launch = *under_way_[lane].front();
    under_way_[lane].pop_front();
    for (AttendOperation* operation : launch.operations) {
      if (operation->request.query_bytes == 0) continue;
      std::memcpy(operation->tensors.output(), operation->tensors.query(),
                  operation->request.query_bytes);
      operation->times.kernel = std::chrono::microseconds(1);
    }
    return control_->result;
  }

 private:
  FakeDeviceControl* const control_;
  std::map<int, std::deque<const Launch*>> under_way_ ABSL_GUARDED_BY(control_->mutex);  // by lane
};

inline Metrics::Options FakeMetricsOptions(std::vector<RpcMethod> methods = {}) {
  return {"test", {{"fake", "fake", "fake"}}, std::move(methods)};
}

// The answer of an Engine or a Fleet that does not let operations wait for staging memory.
template <class Target>
absl::Status AdmitNow(Target* target, AttendOperation* operation) {
  absl::Status answer = absl::UnknownError("no answer");
  target->Admit(operation, /*make_alarm=*/nullptr,
                [&answer](absl::Status status) { answer = std::move(status); });
  return answer;
}

// Sets the spans of a request whose heads are set, and the bytes of its tensors.
inline void SetSpans(std::vector<SpanShape> spans, AttendRequest* request) {
  request->spans = std::move(spans);
  const size_t row_bytes = request->head_dim * kernels::DTypeBytes(request->dtype);
  request->query_bytes =
      static_cast<size_t>(request->query_rows()) * request->num_heads * row_bytes;
  request->key_bytes = request->value_bytes =
      static_cast<size_t>(request->kv_rows()) * request->num_kv_heads * row_bytes;
}

// A valid request of one span.
inline AttendRequest MakeRequest(uint32_t query_rows = 1, uint32_t kv_rows = 1,
                                 uint32_t num_heads = 2, uint32_t num_kv_heads = 1,
                                 uint32_t head_dim = 64) {
  AttendRequest request;
  request.num_heads = num_heads;
  request.num_kv_heads = num_kv_heads;
  request.head_dim = head_dim;
  request.terms.softmax_scale = 0.125f;
  SetSpans({{query_rows, kv_rows, "", {}}}, &request);
  return request;
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_FAKES_H_
