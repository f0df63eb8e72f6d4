// A slow device of several lanes that computes with the float64 reference.
#ifndef FLASHCORE_TESTS_DEVICE_REFERENCE_DEVICE_H_
#define FLASHCORE_TESTS_DEVICE_REFERENCE_DEVICE_H_

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "kernels/oracle/reference.h"
#include "server/base/mutex.h"
#include "server/request/spans.h"
#include "tests/engine/fakes.h"

namespace flashcore::server::testing {

// Its results are those of ReferenceAttention, rounded. Lanes sleep at random, so that launches
// overlap in many ways. Some launches fail, in Dispatch or in Complete, after they have
// written their pages.
class ReferenceDevice final : public HeapDevice {
 public:
  ReferenceDevice(const Options& options, unsigned seed) : HeapDevice(options) {
    for (int lane = 0; lane < options.lanes; ++lane) random_.emplace_back(seed + lane);
  }

  absl::Status Dispatch(int lane, const Launch& launch) override {
    Sleep(lane);
    {
      // A copy covers the whole page, and another launch may be appending rows to that page behind
      // the shared ones. Nobody reads these rows in the copy, but it would be a data race.
      MutexLock lock(&writing_);
      WritePages(launch);
    }
    Sleep(lane);
    std::vector<kernels::Span> spans;
    AppendSpans(launch, kv_memory().base, launch.pages.data(), &spans);
    ComputeAttention(launch.geometry(), spans);
    Sleep(lane);
    return MayFail(lane);
  }

  absl::Status Complete(int lane) override {
    Sleep(lane);
    return MayFail(lane);
  }

 private:
  absl::Status MayFail(int lane) {
    if (random_[lane]() % 100 != 0) return absl::OkStatus();
    return absl::InternalError("the launch failed");
  }

  // Now and then, as on a busy machine each takes long.
  void Sleep(int lane) {
    if (random_[lane]() % 4 != 0) return;
    // gate: jitter, no wait
    std::this_thread::sleep_for(std::chrono::microseconds(random_[lane]() % 100));
  }

  static void ComputeAttention(const kernels::Geometry& geometry,
                               const std::vector<kernels::Span>& spans) {
    const kernels::AttentionBatch batch{geometry, spans.data(), static_cast<int32_t>(spans.size())};
    kernels::StoreResult(kernels::ReferenceAttention(batch), batch);
  }

  std::vector<std::mt19937> random_;  // [lanes]
  Mutex writing_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_DEVICE_REFERENCE_DEVICE_H_
