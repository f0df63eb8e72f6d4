// A device behind a gate, so that a test decides when a launch runs.
#ifndef FLASHCORE_TESTS_TRANSPORT_GATED_DEVICE_H_
#define FLASHCORE_TESTS_TRANSPORT_GATED_DEVICE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/mutex.h"
#include "server/device/device.h"
#include "server/kv/operation.h"

namespace flashcore::server::testing {

// Holds launches while it is closed, and records the clients of each. It may also hold
// registrations of memory. Thread-safe. Outlives the device.
class Gate {
 public:
  void SetOpen(bool open) {
    MutexLock lock(&mutex_);
    open_ = open;
    changed_.NotifyAll();
  }
  // Lets one launch pass, now or later, although the gate is closed.
  void PassOne() {
    MutexLock lock(&mutex_);
    ++passes_;
    changed_.NotifyAll();
  }
  void HoldRegistrations(bool hold) {
    MutexLock lock(&mutex_);
    holds_registrations_ = hold;
    changed_.NotifyAll();
  }
  int registrations() const {  // that have come
    MutexLock lock(&mutex_);
    return registrations_;
  }
  // The clients of the requests of each launch that has reached the gate, by launch.
  std::vector<std::vector<std::string>> launches() const {
    MutexLock lock(&mutex_);
    return launches_;
  }
  size_t arrived() const { return launches().size(); }

  void Enter(const Launch& launch) {
    MutexLock lock(&mutex_);
    std::vector<std::string>& clients = launches_.emplace_back();
    for (const AttendOperation* operation : launch.operations) {
      clients.push_back(operation->identity.name);
    }
    while (!open_ && passes_ == 0) changed_.Wait(&mutex_);
    if (!open_) --passes_;
  }
  void Register() {
    MutexLock lock(&mutex_);
    ++registrations_;
    while (holds_registrations_) changed_.Wait(&mutex_);
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  int passes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool holds_registrations_ ABSL_GUARDED_BY(mutex_) = false;
  int registrations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::vector<std::string>> launches_ ABSL_GUARDED_BY(mutex_);
};

// Another device whose launches wait at the gate. Owns that device, but not the gate.
class GatedDevice final : public Device {
 public:
  GatedDevice(std::unique_ptr<Device> device, Gate* gate)
      : device_(std::move(device)), gate_(gate) {}

  const DeviceInfo& info() const override { return device_->info(); }
  const std::vector<const kernels::Kernel*>& kernels() const override { return device_->kernels(); }
  StagingPool::Allocator staging_allocator() override { return device_->staging_allocator(); }
  KvMemory kv_memory() const override { return device_->kv_memory(); }
  absl::Status Dispatch(int lane, const Launch& launch) override {
    gate_->Enter(launch);
    return device_->Dispatch(lane, launch);
  }
  absl::Status Complete(int lane) override { return device_->Complete(lane); }
  absl::Status CopyPages(int lane, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override {
    return device_->CopyPages(lane, page_bytes, copies);
  }
  absl::Status PinHostMemory(std::byte* data, size_t bytes, bool read_only) const override {
    gate_->Register();
    return device_->PinHostMemory(data, bytes, read_only);
  }
  absl::StatusOr<SharedMemory> AllocateShared(size_t bytes) const override {
    return device_->AllocateShared(bytes);
  }
  void UnpinHostMemory(std::byte* data) const override { device_->UnpinHostMemory(data); }
  absl::Status ResetPersistingL2() override { return device_->ResetPersistingL2(); }

 private:
  const std::unique_ptr<Device> device_;
  Gate* const gate_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_GATED_DEVICE_H_
