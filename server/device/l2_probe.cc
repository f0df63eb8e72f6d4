#include "server/device/l2_probe.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/smxx/read_bytes.h"
#include "server/device/cuda_raii.h"
#include "server/device/cuda_status.h"
#include "server/device/l2_window.h"

namespace flashcore::server {
namespace {

constexpr size_t kColdPerL2 = 4;  // of what is read in between: nothing is left of what came before
// Launches that read what is cold beside a hot read. Each takes about half of the places of an
// H200, so that the hot read finds some, too.
constexpr int kLaunchesBeside = 16;
// The window is on and off in turn, because clocks change while a GPU wakes up. By the data sheet
// an L4 needs 0.8 ms for a read between cold ones and 1.4 ms for one beside, so 0.2 s for all.
constexpr int kTurns = 4;
constexpr int kReadsPerTurn = 10;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

enum class Cold { kBetween, kBeside };

// Two streams, both with the window or both without, as on lanes.
struct StreamPair {
  CudaStream hot;
  CudaStream cold;
};

class Prober {
 public:
  Prober(size_t bytes, size_t cold_bytes) : bytes_(bytes), cold_bytes_(cold_bytes) {}

  absl::Status Allocate() {
    absl::Status status = Store(AllocateDevice(bytes_, "the L2 probe"), &hot_);
    if (status.ok()) status = Store(AllocateDevice(cold_bytes_, "the L2 probe"), &cold_);
    if (status.ok()) status = Store(AllocateDevice(sizeof(uint32_t), "the L2 probe"), &sink_);
    for (StreamPair* streams : {&plain_, &windowed_}) {
      // Its launches are small and leave room; a hot one would keep them out while it runs.
      if (status.ok()) status = Store(MakeStream(StreamPriority::kHigh), &streams->cold);
      if (status.ok()) status = Store(MakeStream(StreamPriority::kLow), &streams->hot);
    }
    for (CudaEvent* event : {&cold_read_, &begin_, &end_}) {
      if (status.ok()) status = Store(MakeEvent(), event);
    }
    for (const CudaStream* stream : {&windowed_.hot, &windowed_.cold}) {
      if (!status.ok()) return status;
      status = SetL2Window(stream->get(), static_cast<std::byte*>(hot_.get()), bytes_);
    }
    return status;
  }

  absl::StatusOr<L2Probe> Measure() {
    L2Probe probe = {bytes_, cold_bytes_, {}, {}};
    absl::Status status = Store(Measure(Cold::kBetween), &probe.between);
    if (status.ok()) status = Store(Measure(Cold::kBeside), &probe.beside);
    if (!status.ok()) return status;
    return probe;
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

  // With `set_aside` bytes of the cache set aside, adds the times of kReadsPerTurn reads.
  absl::Status Read(size_t set_aside, const StreamPair& streams, Cold cold,
                    std::vector<double>* us) {
    absl::Status status = ResetPersistingL2();
    if (status.ok()) status = SetAsideL2(set_aside).status();
    double first = 0;  // has no read before it
    if (status.ok()) status = ReadOnce(streams, cold, &first);
    for (int i = 0; i < kReadsPerTurn && status.ok(); ++i) {
      status = ReadOnce(streams, cold, &us->emplace_back());
    }
    return status;
  }

  // While the GPU reads what is cold, the rest is enqueued: no wait for the host is timed.
  absl::Status ReadOnce(const StreamPair& streams, Cold cold, double* us) {
    cudaStream_t const stream = streams.hot.get();
    auto* const sink = static_cast<uint32_t*>(sink_.get());
    float ms = 0;
    cudaError_t error = ReadCold(1, streams.cold.get());
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

  // All of it, by so many launches.
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
  DeviceMemory sink_;  // a uint32_t
  StreamPair plain_;
  StreamPair windowed_;
  CudaEvent cold_read_;
  CudaEvent begin_;
  CudaEvent end_;
};

}  // namespace

std::string L2Probe::objection() const {
  const bool gains = between.window_gains() || beside.window_gains();
  std::string objection;
  const auto ask = [&](const L2ReadTimes& us, const char* read) {
    if (gains && !us.window_loses()) return;
    absl::StrAppend(&objection, objection.empty() ? "" : "; ", read,
                    us.window_loses() ? " loses" : " does not gain", ", ", us.with_window,
                    " us with a window, ", us.without_window, " us without");
  };
  ask(between, "between other reads it");
  ask(beside, "beside other reads it");
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
