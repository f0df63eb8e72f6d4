#include "server/core/l2_probe.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/smxx/read_bytes.h"
#include "server/core/cuda_raii.h"
#include "server/core/cuda_status.h"
#include "server/core/l2_window.h"

namespace flashcore::server {
namespace {

constexpr size_t kColdPerL2 = 4;  // of what is read in between: nothing is left of what came before
// The window is on and off in turn, because clocks change while a GPU wakes up. By the
// data sheet an L4 needs 0.8 ms for one and what is read before it, so 80 ms for all.
constexpr int kTurns = 4;
constexpr int kReadsPerTurn = 12;

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// `owner`, into `*to`.
template <class Owner>
absl::Status Store(absl::StatusOr<Owner> owner, Owner* to) {
  if (owner.ok()) *to = *std::move(owner);
  return owner.status();
}

class Prober {
 public:
  Prober(size_t bytes, size_t cold_bytes) : bytes_(bytes), cold_bytes_(cold_bytes) {}

  absl::Status Allocate() {
    absl::Status status = Store(AllocateDevice(bytes_, "the L2 probe"), &hot_);
    if (status.ok()) status = Store(AllocateDevice(cold_bytes_, "the L2 probe"), &cold_);
    if (status.ok()) status = Store(AllocateDevice(sizeof(uint32_t), "the L2 probe"), &sink_);
    for (CudaStream* stream : {&plain_, &windowed_}) {
      if (status.ok()) status = Store(MakeStream(), stream);
    }
    for (CudaEvent* event : {&begin_, &end_}) {
      if (status.ok()) status = Store(MakeEvent(), event);
    }
    if (!status.ok()) return status;
    return SetL2Window(windowed_.get(), static_cast<std::byte*>(hot_.get()), bytes_);
  }

  absl::StatusOr<L2Probe> Measure() {
    std::vector<double> with, without;
    absl::Status status;
    for (int turn = 0; turn < kTurns && status.ok(); ++turn) {
      status = Read(0, plain_.get(), &without);
      if (status.ok()) status = Read(bytes_, windowed_.get(), &with);
    }
    if (!status.ok()) return status;
    return L2Probe{bytes_, cold_bytes_, Median(with), Median(without)};
  }

 private:
  // With `set_aside` bytes of the cache set aside, adds the times of kReadsPerTurn reads.
  absl::Status Read(size_t set_aside, cudaStream_t stream, std::vector<double>* us) {
    absl::Status status = ResetPersistingL2();
    if (status.ok()) status = SetAsideL2(set_aside).status();
    double first = 0;  // has no read before it
    if (status.ok()) status = ReadOnce(stream, &first);
    for (int i = 0; i < kReadsPerTurn && status.ok(); ++i) {
      status = ReadOnce(stream, &us->emplace_back());
    }
    return status;
  }

  // While the GPU reads what is cold, the rest is enqueued: no wait for the host is timed.
  absl::Status ReadOnce(cudaStream_t stream, double* us) {
    auto* const sink = static_cast<uint32_t*>(sink_.get());
    float ms = 0;
    cudaError_t error = kernels::ReadBytes(cold_.get(), cold_bytes_, sink, stream);
    if (error == cudaSuccess) error = cudaEventRecord(begin_.get(), stream);
    if (error == cudaSuccess) error = kernels::ReadBytes(hot_.get(), bytes_, sink, stream);
    if (error == cudaSuccess) error = cudaEventRecord(end_.get(), stream);
    if (error == cudaSuccess) error = cudaEventSynchronize(end_.get());
    if (error == cudaSuccess) error = cudaEventElapsedTime(&ms, begin_.get(), end_.get());
    *us = ms * 1e3;
    return CudaStatus(error, "a read of the L2 probe");
  }

  const size_t bytes_;
  const size_t cold_bytes_;
  DeviceMemory hot_;
  DeviceMemory cold_;
  DeviceMemory sink_;  // a uint32_t
  CudaStream plain_;
  CudaStream windowed_;
  CudaEvent begin_;
  CudaEvent end_;
};

}  // namespace

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
