#include "server/device/cpu_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/attention_cpu.h"
#include "server/base/cores.h"
#include "server/base/error_info.h"
#include "server/kv/operation.h"
#include "server/memory/budgets.h"

namespace flashcore::server {
namespace {

std::string CpuName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2) return std::string(absl::StripAsciiWhitespace(parts[1]));
  }
  return "CPU";
}

uint64_t SysConf(int name) {
  const long value = sysconf(name);
  return value > 0 ? static_cast<uint64_t>(value) : 0;
}

// Measured on AMD EPYCs with AVX2 and AVX-512: 65 to 130 GFLOP/s a thread, and 11 GB/s in a decode
// from memory. The lower end, so that a launch seldom takes longer than estimated.
DeviceSpeed SpeedOf(const std::string& simd_target, int threads) {
  const double share = absl::StartsWith(simd_target, "AVX") ? 1 : 0.25;
  return {70e9 * share * threads, 10e9 * threads, std::chrono::microseconds(10)};
}

}  // namespace

void CpuDevice::Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

absl::StatusOr<std::unique_ptr<CpuDevice>> CpuDevice::Create(const Options& options,
                                                             const Clock* clock) {
  auto chosen = ChooseKernels(kernels::Arch::kCpu, options.accumulate);
  if (!chosen.ok()) return chosen.status();
  void* memory = mmap(nullptr, options.kv_memory_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--kv_memory_bytes: the system has no ", options.kv_memory_bytes,
                     " bytes of address space for it: ", std::strerror(errno)));
  }
  // Huge pages save TLB misses, because decode reads all of it. It works without them.
  madvise(memory, options.kv_memory_bytes, MADV_HUGEPAGE);
  MappedMemory owned(static_cast<std::byte*>(memory), Unmap{options.kv_memory_bytes});
  return absl::WrapUnique(new CpuDevice(options, *std::move(chosen), std::move(owned), clock));
}

CpuDevice::CpuDevice(const Options& options, std::vector<const kernels::Kernel*> kernels,
                     MappedMemory kv_memory, const Clock* clock)
    : options_(options),
      kv_memory_(std::move(kv_memory)),
      clock_(clock),
      kernels_(std::move(kernels)),
      threads_(options.threads > 0 ? options.threads : UsableCores()) {
  info_.id = "cpu";
  info_.name = CpuName();
  info_.arch = kernels::CpuSimdTarget();
  info_.memory_bytes = static_cast<uint64_t>(HostMemory::Read().bytes);
  info_.l2_bytes = SysConf(_SC_LEVEL2_CACHE_SIZE);
  info_.lanes = 1;
  info_.compute_units = threads_.num_threads();
  info_.speed = SpeedOf(info_.arch, info_.compute_units);
}

KvMemory CpuDevice::kv_memory() const {
  const auto give_back = [](std::byte* data, size_t bytes) { madvise(data, bytes, MADV_DONTNEED); };
  return {kv_memory_.get(), options_.kv_memory_bytes, options_.kv_hot_bytes, give_back};
}

absl::Status CpuDevice::Dispatch(int /*lane*/, const Launch& launch) {
  const kernels::PageLayout layout = launch.page_layout();
  const TimePoint start = clock_->Now();
  kernels::CopyPagesCpu(layout.page_bytes(), launch.copies.data(),
                        static_cast<int32_t>(launch.copies.size()), &threads_);
  kernels::AppendRowsCpu(layout, launch.appends.data(), static_cast<int32_t>(launch.appends.size()),
                         &threads_);
  spans_.clear();
  AppendSpans(launch, kv_memory_.get(), launch.pages.data(), &spans_);
  const TimePoint copied = clock_->Now();
  TimePoint attended = copied;
  if (!spans_.empty()) {
    if (absl::Status status = RunKernel(launch); !status.ok()) return status;
    attended = clock_->Now();
  }
  for (AttendOperation* operation : launch.operations) {
    operation->times.copy_in = copied - start;
    operation->times.kernel = attended - copied;
    operation->times.copy_out = Nanoseconds(0);
  }
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyPages(int /*lane*/, int64_t page_bytes,
                                  absl::Span<const kernels::PageCopy> copies) {
  kernels::CopyPagesCpu(page_bytes, copies.data(), static_cast<int32_t>(copies.size()), &threads_);
  return absl::OkStatus();
}

// Computes attention for spans_.
absl::Status CpuDevice::RunKernel(const Launch& launch) {
  const auto kernel = KernelFor(launch.geometry());
  if (!kernel.ok()) return kernel.status();
  const kernels::AttentionBatch batch{launch.geometry(), spans_.data(),
                                      static_cast<int32_t>(spans_.size())};
  kernels::PlanOptions plan_options = (*kernel)->plan_options;
  if (!options_.share_prefixes) plan_options.cascade_rows = 0;
  const kernels::Plan& plan = plans_.Get(batch, plan_options, threads_.num_threads());
  void* workspace = Workspace(plan.workspace_bytes);
  if (workspace == nullptr && plan.workspace_bytes > 0) {
    return WithInfo(absl::ResourceExhaustedError(absl::StrCat("no memory for a workspace of ",
                                                              plan.workspace_bytes, " bytes")),
                    reason::kServerFull);
  }
  const int error = (*kernel)->launch(batch, plan, {workspace, &threads_});
  if (error != 0) return absl::InternalError(absl::StrCat("the CPU kernel failed with ", error));
  return absl::OkStatus();
}

void* CpuDevice::Workspace(size_t bytes) {
  if (bytes > workspace_bytes_) {
    workspace_.reset();
    const size_t rounded = (bytes + 63) / 64 * 64;
    workspace_.reset(std::aligned_alloc(64, rounded));
    workspace_bytes_ = workspace_ != nullptr ? rounded : 0;
  }
  return workspace_.get();
}

}  // namespace flashcore::server
