#include "server/device/cuda_device.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "server/device/cuda_lane.h"
#include "server/device/cuda_raii.h"
#include "server/device/cuda_status.h"
#include "server/device/device_lost.h"
#include "server/device/l2_probe.h"
#include "server/device/l2_window.h"
#include "server/memory/block_allocator.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr double kKvShareOfFreeMemory = 0.85;
constexpr int kMinComputeCapability = 8;  // major: cp.async and mma.sync of BF16

// Device memory for the tensors of any one request: Q, K and V; O, as large as Q; LSE, which is
// largest beside Q at head_dim 32; and what aligns them.
size_t TensorBytes(size_t max_request_bytes) {
  constexpr size_t kPadding = 8 * StagingPool::kAlignment;
  return 2 * max_request_bytes + max_request_bytes / 16 + kPadding;
}

}  // namespace

struct CudaDevice::Memory {
  DeviceMemory memory;
  size_t bytes = 0;
};

struct CudaDevice::Staging {
  PinnedMemory memory;
  BlockAllocator pieces;  // of it
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
  auto chosen = ChooseKernels(kernels::Arch::kSm80, options.accumulate);
  if (!chosen.ok()) return chosen.status();
  auto device = absl::WrapUnique(new CudaDevice(options, *std::move(chosen)));
  absl::Status status = device->Select();
  if (status.ok()) status = device->ReadInfo();
  if (status.ok()) status = device->ChooseHotBytes();  // first: it needs memory for a moment
  if (status.ok()) status = device->AllocateStaging();
  if (status.ok()) status = device->MakeLanes();
  if (status.ok()) status = device->AllocateArena();
  if (status.ok()) status = device->SetWindows();
  if (!status.ok()) return status;
  return device;
}

CudaDevice::CudaDevice(const Options& options, std::vector<const kernels::Kernel*> kernels)
    : options_(options), kernels_(std::move(kernels)) {}

CudaDevice::~CudaDevice() {
  (void)Select();  // or what it owns would be freed on GPU 0, and wake that
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
  info_.arch = absl::StrCat("sm_", properties.major, properties.minor);
  info_.memory_bytes = properties.totalGlobalMem;
  info_.l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
  info_.l2_persisting_max_bytes = static_cast<uint64_t>(properties.persistingL2CacheMaxSize);
  info_.lanes = options_.lanes;
  info_.slots = options_.slots;
  info_.idle_spin = options_.idle_spin;
  info_.compute_units = properties.multiProcessorCount;
  if (properties.major >= kMinComputeCapability) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("no kernels for ", info_.id, ", a ", info_.name,
                                               ": it is ", info_.arch, ", they need sm_",
                                               kMinComputeCapability, "0 or later"));
}

absl::Status CudaDevice::ChooseHotBytes() {
  if (options_.l2_window == L2Window::kOff) {
    info_.l2_note = "it is switched off";
    return absl::OkStatus();
  }
  if (info_.l2_persisting_max_bytes == 0) {
    info_.l2_note = "the GPU keeps nothing persisting in its L2 (under MIG none does)";
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
                       {"window", objection.empty()}});
  if (objection.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("it does not pay: reading ", probe->bytes, " bytes again ", objection));
}

absl::Status CudaDevice::AllocateStaging() {
  auto memory = AllocatePinned(options_.staging_memory_bytes, "staging");
  if (!memory.ok()) return memory.status();
  auto* const block = static_cast<std::byte*>(memory->get());
  staging_.reset(new Staging{*std::move(memory), {block, options_.staging_memory_bytes}});
  return absl::OkStatus();
}

absl::Status CudaDevice::MakeLanes() {
  CudaLane::Options options;
  options.slots = options_.slots;
  options.slot.tensor_bytes = TensorBytes(options_.max_request_bytes);
  options.slot.workspace_bytes = options_.workspace_bytes;
  options.slot.list_bytes = options_.list_bytes;
  options.slot.multiprocessors = info_.compute_units;
  options.slot.direct_bytes = options_.direct_io_bytes;
  options.slot.wait = options_.wait;
  for (int i = 0; i < options_.lanes; ++i) {
    auto lane = CudaLane::Create(options);
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
  arena_ = std::make_unique<Memory>();
  arena_->bytes = options_.kv_memory_bytes > 0
                      ? options_.kv_memory_bytes
                      : static_cast<size_t>(static_cast<double>(free_bytes) * kKvShareOfFreeMemory);
  auto memory = AllocateDevice(arena_->bytes, "resident K/V");
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat(memory.status().message(), "; ", free_bytes, " of ",
                                     total_bytes, " bytes are free"));
  }
  arena_->memory = *std::move(memory);
  return absl::OkStatus();
}

absl::Status CudaDevice::SetWindows() {
  hot_bytes_ = std::min(hot_bytes_, arena_->bytes);
  info_.l2_persisting_bytes = L2SetAside().value_or(0);
  if (hot_bytes_ == 0) return absl::OkStatus();
  for (const auto& lane : lanes_) {
    for (cudaStream_t stream : lane->streams()) {
      absl::Status status = SetL2Window(stream, kv_memory().base, hot_bytes_);
      if (!status.ok()) return status;
    }
  }
  info_.l2_window_bytes = hot_bytes_;
  return absl::OkStatus();
}

StagingPool::Allocator CudaDevice::staging_allocator() {
  BlockAllocator* const pieces = &staging_->pieces;
  return {[pieces](size_t bytes) { return pieces->Allocate(bytes); },
          [pieces](void* piece) { pieces->Free(static_cast<std::byte*>(piece)); }};
}

KvMemory CudaDevice::kv_memory() const {
  return {static_cast<std::byte*>(arena_->memory.get()), arena_->bytes, hot_bytes_};
}

absl::Status CudaDevice::Start(int lane, const Launch& launch) {
  const kernels::Geometry geometry = launch.geometry();
  const auto kernel =
      std::find_if(kernels_.begin(), kernels_.end(), [&](const kernels::Kernel* candidate) {
        return candidate->spec.dtype == geometry.dtype &&
               candidate->spec.head_dim == geometry.head_dim;
      });
  if (kernel == kernels_.end()) {
    return absl::UnimplementedError(absl::StrCat(info_.id, " has no kernel for ",
                                                 kernels::Name(geometry.dtype), " of head_dim ",
                                                 geometry.head_dim));
  }
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->Start(**kernel, kv_memory().base, launch);
}

absl::Status CudaDevice::Wait(int lane) {
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->Wait();
}

absl::Status CudaDevice::CopyPages(int lane, int64_t page_bytes,
                                   absl::Span<const kernels::PageCopy> copies) {
  if (absl::Status status = Select(); !status.ok()) return status;
  return lanes_[lane]->CopyPages(page_bytes, copies);
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

absl::Status CudaDevice::ForgetHot() {
  if (hot_bytes_ == 0) return absl::OkStatus();
  if (absl::Status status = Select(); !status.ok()) return status;
  return ResetPersistingL2();
}

}  // namespace flashcore::server
