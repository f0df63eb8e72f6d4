#include "server/core/cpu_device.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/attention_cpu.h"
#include "server/core/spans.h"

namespace flashcore::server {
namespace {

int AvailableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

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

}  // namespace

void CpuDevice::Free::operator()(void* memory) const { std::free(memory); }

CpuDevice::CpuDevice(int threads, const Clock* clock)
    : clock_(clock), threads_(threads > 0 ? threads : AvailableCores()) {
  info_.id = "cpu";
  info_.name = CpuName();
  info_.arch = kernels::CpuSimdTarget();
  info_.memory_bytes = SysConf(_SC_PHYS_PAGES) * SysConf(_SC_PAGE_SIZE);
  info_.l2_bytes = SysConf(_SC_LEVEL2_CACHE_SIZE);
  info_.lanes = 1;
  info_.compute_units = threads_.num_threads();
  for (const kernels::Kernel& kernel : kernels::AllKernels()) {
    if (kernel.spec.arch == kernels::Arch::kCpu) kernels_.push_back(&kernel);
  }
}

absl::Status CpuDevice::Run(int /*lane*/, absl::Span<AttendOperation* const> batch) {
  const TimePoint start = clock_->Now();
  const kernels::Geometry geometry = batch.front()->request.geometry();
  kernels::KernelSpec asked;
  asked.arch = kernels::Arch::kCpu;
  asked.dtype = geometry.dtype;
  asked.head_dim = geometry.head_dim;
  asked.features = kernels::kFeatureMask | kernels::kFeatureLse;
  const kernels::Kernel* kernel = kernels::FindKernel(asked);
  if (kernel == nullptr) return absl::UnimplementedError(kernels::ExplainMissing(asked));

  spans_.clear();
  for (const AttendOperation* operation : batch) {
    const AttendTensors& tensors = operation->tensors;
    AppendSpans(operation->request,
                {tensors.query(), tensors.key(), tensors.value(), tensors.output(), tensors.lse()},
                &spans_);
  }
  const kernels::AttentionBatch spans{geometry, spans_.data(), static_cast<int32_t>(spans_.size())};
  kernels::MakePlan(spans, kernel->plan_options, threads_.num_threads(), &plan_);
  void* workspace = Workspace(plan_.workspace_bytes);
  if (workspace == nullptr && plan_.workspace_bytes > 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a workspace of ", plan_.workspace_bytes, " bytes"));
  }
  const TimePoint launched = clock_->Now();
  const int error = kernel->launch(spans, plan_, {workspace, &threads_, nullptr});
  const TimePoint finished = clock_->Now();
  if (error != 0) return absl::InternalError(absl::StrCat("the CPU kernel failed with ", error));
  for (AttendOperation* operation : batch) {
    operation->times.copy_in = launched - start;
    operation->times.kernel = finished - launched;
    operation->times.copy_out = Nanoseconds(0);
  }
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
