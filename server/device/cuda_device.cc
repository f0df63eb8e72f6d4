#include "server/device/cuda_device.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/registry.h"
#include "server/device/cuda_lane.h"
#include "server/device/cuda_resources.h"
#include "server/device/cuda_shared_memory.h"
#include "server/device/l2_window.h"
#include "server/memory/block_allocator.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr double kKvShareOfFreeMemory = 0.85;

// Half of what the tensor cores of an SM of Ada can do in a cycle. Our kernels reach more: 1,150 on
// an H200 (kernels/RESULTS.md).
constexpr double kFlopPerCycle = 512;
constexpr double kShareOfBandwidth = 0.7;

bool HasMps(int ordinal) {
  int has = 0;
#if CUDART_VERSION >= 12030
  if (cudaDeviceGetAttribute(&has, cudaDevAttrMpsEnabled, ordinal) != cudaSuccess) return false;
#else
  (void)ordinal;  // that toolkit cannot tell
  has = 1;
#endif
  return has != 0;
}

}  // namespace

struct CudaDevice::Memory {
  PinnedMemory staging;
  std::optional<BlockAllocator> staging_pieces;
  DeviceMemory arena;
  size_t arena_bytes = 0;
};

absl::Status CudaDevice::Find(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    return absl::NotFoundError(
        absl::StrCat("no GPU can be used: ", CudaStatus(error, "cudaGetDeviceCount").message()));
  }
  if (ordinal < count) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("there is no cuda:", ordinal, ": the driver has ", count,
                                          count == 1 ? " GPU" : " GPUs"));
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(const Options& options) {
  if (absl::Status status = Find(options.ordinal); !status.ok()) return status;
  auto device = absl::WrapUnique(new CudaDevice(options));
  absl::Status status = device->Select();
  if (status.ok()) status = device->ReadInfo();
  if (status.ok()) status = device->ChooseHotBytes();  // first: the probe needs memory for a moment
  if (status.ok()) status = device->AllocateStaging();
  if (status.ok()) status = device->MakeLanes();
  if (status.ok()) status = device->AllocateArena();
  if (status.ok()) status = device->SetWindows();
  if (!status.ok()) return status;
  return device;
}

CudaDevice::CudaDevice(const Options& options)
    : options_(options), memory_(std::make_unique<Memory>()) {}

CudaDevice::~CudaDevice() {
  (void)Select();  // otherwise its memory would be freed on GPU 0, and create a context there
}

absl::Status CudaDevice::Select() const {
  return CudaStatus(cudaSetDevice(options_.ordinal), "cudaSetDevice");
}

absl::Status CudaDevice::ReadInfo() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, options_.ordinal);
  if (error != cudaSuccess) return CudaStatus(error, "cudaGetDeviceProperties");
  info_.id = absl::StrCat("cuda:", options_.ordinal);
  info_.name = properties.name;
  info_.uuid.assign(properties.uuid.bytes, sizeof(properties.uuid.bytes));
  info_.arch = absl::StrCat("sm_", properties.major, properties.minor);
  info_.memory_bytes = properties.totalGlobalMem;
  info_.l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
  info_.l2_persisting_max_bytes = static_cast<uint64_t>(properties.persistingL2CacheMaxSize);
  info_.lanes = options_.lanes;
  info_.idle_spin = options_.idle_spin;
  info_.compute_units = properties.multiProcessorCount;
  info_.has_mps = HasMps(options_.ordinal);
  if (absl::Status status = ReadSpeed(); !status.ok()) return status;
  const auto arch =
      kernels::ArchOf(10 * properties.major + properties.minor, properties.sharedMemPerBlockOptin);
  if (!arch.has_value()) {
    return absl::UnimplementedError(absl::StrCat("no kernels for ", info_.id, ", a ", info_.name,
                                                 ": it is ", info_.arch, ", they need sm_",
                                                 kernels::kLeastComputeCapability, " or later"));
  }
  auto chosen = ChooseKernels(*arch, options_.accumulate);
  if (!chosen.ok()) return chosen.status();
  kernels_ = *std::move(chosen);
  return absl::OkStatus();
}

absl::Status CudaDevice::ReadSpeed() {
  int clock_khz = 0, memory_khz = 0, bus_bits = 0;
  absl::Status status;
  const auto read = [&](cudaDeviceAttr attribute, int* value) {
    status.Update(CudaStatus(cudaDeviceGetAttribute(value, attribute, options_.ordinal),
                             "cudaDeviceGetAttribute"));
  };
  read(cudaDevAttrClockRate, &clock_khz);
  read(cudaDevAttrMemoryClockRate, &memory_khz);
  read(cudaDevAttrGlobalMemoryBusWidth, &bus_bits);
  info_.speed.flop_per_s = kFlopPerCycle * 1e3 * clock_khz * info_.compute_units;
  info_.speed.bytes_per_s =
      kShareOfBandwidth * 2e3 * memory_khz * bus_bits / 8;  // double data rate
  info_.speed.request = std::chrono::microseconds(5);
  return status;
}

absl::Status CudaDevice::ChooseHotBytes() {
  if (options_.l2_window == L2Window::kOff) {
    info_.l2_note = "the window is switched off";
    return absl::OkStatus();
  }
  if (info_.l2_persisting_max_bytes == 0) {
    info_.l2_note = "the GPU's L2 has no persisting lines (under MIG no GPU's has)";
    return absl::OkStatus();
  }
  const auto set_aside = L2SetAside();
  const absl::Status status = set_aside.ok() ? TryL2Window() : set_aside.status();
  if (status.ok()) return status;
  hot_bytes_ = 0;
  if (IsDeviceLost(status)) return status;
  info_.l2_note = std::string(status.message());
  if (set_aside.ok()) (void)SetAsideL2(*set_aside);
  return absl::OkStatus();
}

absl::Status CudaDevice::TryL2Window() {
  int window_max_bytes = 0;
  const cudaError_t error = cudaDeviceGetAttribute(
      &window_max_bytes, cudaDevAttrMaxAccessPolicyWindowSize, options_.ordinal);
  if (error != cudaSuccess) return CudaStatus(error, "cudaDeviceGetAttribute");
  L2Limits limits = {info_.l2_persisting_max_bytes, static_cast<size_t>(window_max_bytes)};
  const size_t kv_bytes = options_.kv_memory_bytes > 0 ? options_.kv_memory_bytes : ~size_t{0};
  const auto hot_bytes = [&] {
    return HotSegmentBytes(limits, options_.l2_budget_bytes, kv_bytes, options_.superblock_bytes);
  };
  const auto granted = SetAsideL2(hot_bytes());
  if (!granted.ok()) return granted.status();
  limits.persisting_max_bytes = std::min(*granted, limits.persisting_max_bytes);
  hot_bytes_ = hot_bytes();
  if (hot_bytes_ == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("no superblock of ", options_.superblock_bytes, " bytes fits; the GPU set ",
                     *granted, " bytes aside"));
  }
  return options_.l2_window == L2Window::kAuto ? ProbeL2() : absl::OkStatus();
}

absl::Status CudaDevice::ProbeL2() const {
  const auto probe = ProbeL2Window(hot_bytes_, info_.l2_bytes);
  if (!probe.ok()) return probe.status();
  const std::string objection = probe->objection();
  LogInfo("L2 probe", {{"device", info_.id},
                       {"bytes", probe->bytes},
                       {"cold_bytes", probe->cold_bytes},
                       {"us_between_with_window", probe->between.with_window},
                       {"us_between_without_window", probe->between.without_window},
                       {"us_beside_with_window", probe->beside.with_window},
                       {"us_beside_without_window", probe->beside.without_window},
                       {"us_cold_with_window", probe->cold.with_window},
                       {"us_cold_without_window", probe->cold.without_window},
                       {"window", objection.empty()}});
  if (objection.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the window does not pay: reading ",
                                                    probe->bytes, " bytes again took ", objection));
}

absl::Status CudaDevice::AllocateStaging() {
  const size_t bytes = options_.staging_memory_bytes;
  CudaAllocator take;
  take.Memory(bytes, "staging", &memory_->staging);
  memory_->staging_pieces.emplace(static_cast<std::byte*>(memory_->staging.get()), bytes);
  return take.status();
}

absl::Status CudaDevice::MakeLanes() {
  for (int i = 0; i < options_.lanes; ++i) {
    auto lane = CudaLane::Create(options_, info_.compute_units);
    if (!lane.ok()) {
      return absl::Status(lane.status().code(), absl::StrCat("lane ", i, " of ", options_.lanes,
                                                             ": ", lane.status().message()));
    }
    lanes_.push_back(*std::move(lane));
  }
  return absl::OkStatus();
}

absl::Status CudaDevice::AllocateArena() {
  size_t free_bytes = 0, total_bytes = 0;
  const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  if (error != cudaSuccess) return CudaStatus(error, "cudaMemGetInfo");
  const size_t rest = free_bytes - std::min(free_bytes, options_.shared_bytes);
  const size_t bytes = options_.kv_memory_bytes > 0
                           ? options_.kv_memory_bytes
                           : static_cast<size_t>(static_cast<double>(rest) * kKvShareOfFreeMemory);
  CudaAllocator take;
  take.Memory(bytes, "resident K/V", &memory_->arena);
  memory_->arena_bytes = bytes;
  if (take.status().ok()) return absl::OkStatus();
  return absl::Status(take.status().code(), absl::StrCat(take.status().message(), "; ", free_bytes,
                                                         " of ", total_bytes, " bytes are free"));
}

absl::Status CudaDevice::SetWindows() {
  hot_bytes_ = std::min(hot_bytes_, memory_->arena_bytes);
  info_.l2_persisting_bytes = L2SetAside().value_or(0);
  if (hot_bytes_ == 0) return absl::OkStatus();
  for (const auto& lane : lanes_) {
    absl::Status status = lane->SetL2Window(kv_memory().base, hot_bytes_);
    if (!status.ok()) return status;
  }
  info_.l2_window_bytes = hot_bytes_;
  return absl::OkStatus();
}

StagingPool::Allocator CudaDevice::staging_allocator() {
  BlockAllocator* const pieces = &*memory_->staging_pieces;
  return {[pieces](size_t bytes) { return pieces->Allocate(bytes); },
          [pieces](void* piece) { pieces->Free(static_cast<std::byte*>(piece)); }};
}

KvMemory CudaDevice::kv_memory() const {
  return {static_cast<std::byte*>(memory_->arena.get()), memory_->arena_bytes, hot_bytes_};
}

absl::Status CudaDevice::Stage(int lane, const Launch& launch) {
  const auto kernel = KernelFor(launch.geometry());
  if (!kernel.ok()) return kernel.status();
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->Stage(**kernel, kv_memory().base, launch);
}

absl::Status CudaDevice::Dispatch(int lane, const Launch& launch) {
  const auto kernel = KernelFor(launch.geometry());
  if (!kernel.ok()) return kernel.status();
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->Dispatch(**kernel, kv_memory().base, launch);
}

absl::Status CudaDevice::Complete(int lane) {
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->Complete();
}

absl::Status CudaDevice::CopyPages(int lane, int64_t page_bytes,
                                   absl::Span<const kernels::PageCopy> copies) {
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->CopyPages(page_bytes, copies);
}

absl::StatusOr<Device::SharedMemory> CudaDevice::AllocateShared(size_t bytes) const {
  if (absl::Status status = Select(); !status.ok()) return status;
  return AllocateCudaShared(options_.ordinal, bytes);
}

absl::Status CudaDevice::CheckCanReachHost(bool read_only) const {
  const auto require = [this](cudaDeviceAttr attribute, const char* what) {
    int has = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&has, attribute, options_.ordinal);
    if (error != cudaSuccess) return CudaStatus(error, "cudaDeviceGetAttribute");
    return has != 0 ? absl::OkStatus()
                    : absl::UnimplementedError(absl::StrCat(info_.id, " cannot ", what));
  };
  absl::Status status = require(cudaDevAttrCanUseHostPointerForRegisteredMem,
                                "reach registered memory at the host's address");
  if (status.ok() && read_only) {
    status = require(cudaDevAttrHostRegisterReadOnlySupported, "register read-only memory");
  }
  return status;
}

absl::Status CudaDevice::PinHostMemory(std::byte* data, size_t bytes, bool read_only) const {
  if (absl::Status status = Select(); !status.ok()) return status;
  if (absl::Status status = CheckCanReachHost(read_only); !status.ok()) return status;
  unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  if (read_only) flags |= cudaHostRegisterReadOnly;
  return CudaStatus(cudaHostRegister(data, bytes, flags), "cudaHostRegister");
}

void CudaDevice::UnpinHostMemory(std::byte* data) const {
  if (!Select().ok()) return;
  const absl::Status status = CudaStatus(cudaHostUnregister(data), "cudaHostUnregister");
  if (!status.ok()) LogWarning("shared memory stays pinned", {{"error", status.message()}});
}

absl::Status CudaDevice::ResetPersistingL2() {
  if (hot_bytes_ == 0) return absl::OkStatus();
  if (absl::Status status = Select(); !status.ok()) return status;
  return server::ResetPersistingL2();
}

}  // namespace flashcore::server
