// Counts in the plans of a device's launches which ways of the kernels they take.
#ifndef FLASHCORE_TESTS_ENGINE_PLAN_PROBE_H_
#define FLASHCORE_TESTS_ENGINE_PLAN_PROBE_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/plan.h"
#include "server/device/device.h"

namespace flashcore::server::testing {

struct PlanCounts {
  std::atomic<int> split_tiles{0};    // over paged K/V
  std::atomic<int> cascade_items{0};  // each reads a prefix once for several spans
  std::atomic<int> cascades_of_3{0};  // those for at least three spans
  std::atomic<int> parts{0};          // launches that were parts of another
  // Some kernel that has run shares every prefix that it can.
  std::atomic<bool> may_cascade{false};

  // All these ways were taken often.
  bool enough() const {
    return split_tiles > 100 && (!may_cascade || (cascade_items > 20 && cascades_of_3 > 0));
  }
};

// Another device, which it owns. It makes the plan that the device makes for the launch, once more.
// It says that it has one compute unit, so that launches are cut into parts as small as can be: a
// part has work for all.
class PlanProbe final : public Device {
 public:
  // `counts` outlives the device.
  PlanProbe(std::unique_ptr<Device> device, PlanCounts* counts)
      : device_(std::move(device)), info_(device_->info()), counts_(*counts) {
    info_.compute_units = 1;
  }

  const DeviceInfo& info() const override { return info_; }
  const std::vector<const kernels::Kernel*>& kernels() const override { return device_->kernels(); }
  StagingPool::Allocator staging_allocator() override { return device_->staging_allocator(); }
  KvMemory kv_memory() const override { return device_->kv_memory(); }
  absl::Status Dispatch(int lane, const Launch& launch) override {
    Count(launch);
    counts_.parts += launch.in_parts;
    return device_->Dispatch(lane, launch);
  }
  absl::Status Complete(int lane) override { return device_->Complete(lane); }
  absl::Status CopyPages(int lane, int64_t page_bytes,
                         absl::Span<const kernels::PageCopy> copies) override {
    return device_->CopyPages(lane, page_bytes, copies);
  }
  absl::Status ResetPersistingL2() override { return device_->ResetPersistingL2(); }

 private:
  void Count(const Launch& launch) {
    std::vector<kernels::Span> spans;
    AppendSpans(launch, kv_memory().base, launch.pages.data(), &spans);
    if (spans.empty()) return;
    const kernels::Geometry geometry = launch.geometry();
    const auto kernel = KernelFor(geometry);
    if (!kernel.ok()) return;
    const kernels::PlanOptions& options = (*kernel)->plan_options;
    kernels::Plan plan;
    kernels::MakePlan({geometry, spans.data(), static_cast<int32_t>(spans.size())}, options,
                      device_->info().compute_units, &plan);
    if (options.cascade_rows > 0 && options.cascade_saving == 0) counts_.may_cascade = true;
    for (const kernels::CombineItem& tile : plan.combines) {
      if (spans[tile.span].kv.pages != nullptr) ++counts_.split_tiles;
    }
    for (const kernels::WorkItem& item : plan.items) {
      counts_.cascade_items += item.IsCascade();
      counts_.cascades_of_3 += item.num_cascade_spans >= 3;
    }
  }

  const std::unique_ptr<Device> device_;
  DeviceInfo info_;
  PlanCounts& counts_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_PLAN_PROBE_H_
