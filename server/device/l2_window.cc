#include "server/device/l2_window.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/read_bytes.h"
#include "server/device/cuda_resources.h"

namespace flashcore::server {
namespace {

// Cold bytes per byte of L2: enough to evict everything that a window does not protect.
constexpr size_t kColdPerL2 = 4;
// Launches of cold reads beside a hot read. Each occupies about half of an H200, so the hot read
// finds free multiprocessors.
constexpr int kLaunchesBeside = 16;
// Turns with and without the window alternate, because clocks change while a GPU wakes up. By its
// data sheet an L4 takes 0.8 ms for a read between cold ones and 1.4 ms beside: 0.2 s for all.
constexpr int kTurns = 4;
constexpr int kReadsPerTurn = 10;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

enum class Cold { kBetween, kBeside, kOnly };

// Both streams have the window, or neither has, as on lanes.
struct StreamPair {
  CudaStream hot;
  CudaStream cold;
};

class Prober {
 public:
  Prober(size_t bytes, size_t cold_bytes) : bytes_(bytes), cold_bytes_(cold_bytes) {}

  absl::Status Allocate() {
    CudaAllocator take;
    take.Memory(bytes_, "the L2 probe", &hot_);
    take.Memory(cold_bytes_, "the L2 probe", &cold_);
    take.Memory(sizeof(uint32_t), "the L2 probe", &sink_);
    for (StreamPair* streams : {&plain_, &windowed_}) {
      // Cold launches are small and leave room for a hot one. A hot launch would keep them waiting.
      take.Stream(StreamPriority::kHigh, &streams->cold);
      take.Stream(StreamPriority::kLow, &streams->hot);
    }
    for (CudaEvent* event : {&cold_read_, &begin_, &end_}) take.Event(cudaEventDefault, event);
    absl::Status status = take.status();
    for (const CudaStream* stream : {&windowed_.hot, &windowed_.cold}) {
      if (!status.ok()) return status;
      status = SetL2Window(stream->get(), static_cast<std::byte*>(hot_.get()), bytes_);
    }
    return status;
  }

  absl::StatusOr<L2Probe> Measure() {
    const auto between = Measure(Cold::kBetween);
    if (!between.ok()) return between.status();
    const auto beside = Measure(Cold::kBeside);
    if (!beside.ok()) return beside.status();
    const auto cold = Measure(Cold::kOnly);
    if (!cold.ok()) return cold.status();
    return L2Probe{bytes_, cold_bytes_, *between, *beside, *cold};
  }

 private:
  absl::StatusOr<L2ReadTimes> Measure(Cold cold) {
    std::vector<double> with, without;
    absl::Status status;
    for (int turn = 0; turn < kTurns && status.ok(); ++turn) {
      status = Read(0, plain_, cold, &without);
      if (status.ok()) status = Read(bytes_, windowed_, cold, &with);
    }
    if (!status.ok()) return status;
    return L2ReadTimes{Median(with), Median(without)};
  }

  // Sets `set_aside` bytes of the cache aside, and appends the times of kReadsPerTurn reads.
  absl::Status Read(size_t set_aside, const StreamPair& streams, Cold cold,
                    std::vector<double>* us) {
    absl::Status status = ResetPersistingL2();
    if (status.ok()) status = SetAsideL2(set_aside).status();
    double first = 0;  // not kept: no read came before it
    if (status.ok()) status = ReadOnce(streams, cold, &first);
    for (int i = 0; i < kReadsPerTurn && status.ok(); ++i) {
      status = ReadOnce(streams, cold, &us->emplace_back());
    }
    return status;
  }

  // Enqueues the hot read while the GPU is busy with the cold one, so that the time contains no
  // wait for the host.
  absl::Status ReadOnce(const StreamPair& streams, Cold cold, double* us) {
    cudaStream_t const stream = streams.hot.get();
    auto* const sink = static_cast<uint32_t*>(sink_.get());
    float ms = 0;
    cudaError_t error = ReadCold(1, streams.cold.get());
    if (error == cudaSuccess && cold == Cold::kOnly) {
      error = cudaEventRecord(begin_.get(), streams.cold.get());
      if (error == cudaSuccess) error = ReadCold(1, streams.cold.get());
      if (error == cudaSuccess) error = cudaEventRecord(end_.get(), streams.cold.get());
      if (error == cudaSuccess) error = cudaStreamSynchronize(streams.cold.get());
      if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, begin_.get(), end_.get());
      *us = ms * 1e3;
      return CudaStatus(error, "a read of the L2 probe");
    }
    if (error == cudaSuccess) error = cudaEventRecord(cold_read_.get(), streams.cold.get());
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, cold_read_.get(), 0);
    if (error == cudaSuccess) error = cudaEventRecord(begin_.get(), stream);
    if (error == cudaSuccess) error = kernels::ReadBytes(hot_.get(), bytes_, sink, stream);
    if (error == cudaSuccess) error = cudaEventRecord(end_.get(), stream);
    if (error == cudaSuccess && cold == Cold::kBeside) {
      error = ReadCold(kLaunchesBeside, streams.cold.get());
    }
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(streams.cold.get());
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, begin_.get(), end_.get());
    *us = ms * 1e3;
    return CudaStatus(error, "a read of the L2 probe");
  }

  // Reads all cold memory in `launches` launches.
  cudaError_t ReadCold(int launches, cudaStream_t stream) {
    const size_t launch_bytes = cold_bytes_ / static_cast<size_t>(launches);
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < launches && error == cudaSuccess; ++i) {
      error = kernels::ReadBytes(static_cast<std::byte*>(cold_.get()) + i * launch_bytes,
                                 launch_bytes, static_cast<uint32_t*>(sink_.get()), stream);
    }
    return error;
  }

  const size_t bytes_;
  const size_t cold_bytes_;
  DeviceMemory hot_;
  DeviceMemory cold_;
  DeviceMemory sink_;  // one uint32_t
  StreamPair plain_;
  StreamPair windowed_;
  CudaEvent cold_read_;
  CudaEvent begin_;
  CudaEvent end_;
};

}  // namespace

size_t HotSegmentBytes(const L2Limits& limits, size_t budget_bytes, size_t arena_bytes,
                       size_t superblock_bytes) {
  size_t bytes = std::min({limits.persisting_max_bytes, limits.window_max_bytes, arena_bytes});
  if (budget_bytes > 0) bytes = std::min(bytes, budget_bytes);
  return bytes / superblock_bytes * superblock_bytes;
}

absl::StatusOr<size_t> L2SetAside() {
  size_t bytes = 0;
  absl::Status status = CudaStatus(cudaDeviceGetLimit(&bytes, cudaLimitPersistingL2CacheSize),
                                   "cudaDeviceGetLimit of the persisting L2");
  if (!status.ok()) return status;
  return bytes;
}

absl::StatusOr<size_t> SetAsideL2(size_t bytes) {
  absl::Status status =
      CudaStatus(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes),
                 "cudaDeviceSetLimit of the persisting L2 (not for a process under MPS)");
  if (!status.ok()) return status;
  return L2SetAside();
}

absl::Status SetL2Window(cudaStream_t stream, std::byte* base, size_t bytes) {
  cudaStreamAttrValue value = {};
  value.accessPolicyWindow.base_ptr = base;
  value.accessPolicyWindow.num_bytes = bytes;
  value.accessPolicyWindow.hitRatio = 1.0f;
  value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  value.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  return CudaStatus(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value),
                    "cudaStreamSetAttribute of the access-policy window");
}

absl::Status ResetPersistingL2() {
  return CudaStatus(cudaCtxResetPersistingL2Cache(), "cudaCtxResetPersistingL2Cache");
}

std::string L2Probe::objection() const {
  const bool gains = between.window_gains() || beside.window_gains();
  std::string objection;
  const auto check = [&](const L2ReadTimes& us, const char* read) {
    if (gains && !us.window_loses()) return;
    absl::StrAppend(&objection, objection.empty() ? "" : "; ", read, " ", us.with_window,
                    " us with a window, ", us.without_window, " us without (",
                    us.window_loses() ? "a loss" : "no gain", ")");
  };
  check(between, "between other reads");
  check(beside, "beside other reads");
  if (cold.window_loses()) {
    absl::StrAppend(&objection, objection.empty() ? "" : "; ", "reading ", cold_bytes,
                    " other bytes ", cold.with_window, " us with a window, ", cold.without_window,
                    " us without (a loss)");
  }
  return objection;
}

absl::StatusOr<L2Probe> ProbeL2Window(size_t bytes, size_t l2_bytes) {
  const auto set_aside = L2SetAside();
  if (!set_aside.ok()) return set_aside.status();
  Prober prober(bytes, kColdPerL2 * l2_bytes);
  if (absl::Status status = prober.Allocate(); !status.ok()) return status;
  auto measured = prober.Measure();
  absl::Status restored = ResetPersistingL2();
  if (restored.ok()) restored = SetAsideL2(*set_aside).status();
  if (measured.ok() && !restored.ok()) return restored;
  return measured;
}

}  // namespace flashcore::server
