#include "server/device/device.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "kernels/registry.h"

namespace flashcore::server {

absl::StatusOr<std::vector<const kernels::Kernel*>> ChooseKernels(kernels::Arch arch,
                                                                  kernels::Accumulate accumulate) {
  std::vector<const kernels::Kernel*> chosen;
  for (const kernels::Kernel& kernel : kernels::AllKernels()) {
    if (kernel.spec.arch == arch && kernel.spec.accumulate == accumulate) {
      chosen.push_back(&kernel);
    }
  }
  if (!chosen.empty()) return chosen;
  kernels::KernelSpec asked;
  asked.arch = arch;
  asked.accumulate = accumulate;
  return absl::UnimplementedError(
      absl::StrCat("no kernels for ", kernels::Name(arch), ": ", kernels::ExplainMissing(asked)));
}

absl::StatusOr<const kernels::Kernel*> Device::KernelFor(const kernels::Geometry& geometry) const {
  const kernels::Kernel* of_16_bit = nullptr;
  for (const kernels::Kernel* kernel : kernels()) {
    const kernels::KernelSpec& spec = kernel->spec;
    if (spec.dtype != geometry.dtype || spec.head_dim != geometry.head_dim ||
        spec.kv_dtype != geometry.kv_dtype) {
      continue;
    }
    if (spec.precision == geometry.precision) return kernel;
    if (spec.precision == kernels::Precision::k16Bit) of_16_bit = kernel;
  }
  if (of_16_bit != nullptr) return of_16_bit;
  return absl::UnimplementedError(
      absl::StrCat(info().id, " has no kernel for ", kernels::Name(geometry.dtype), " of head_dim ",
                   geometry.head_dim, " over K/V ", kernels::Name(geometry.kv_dtype)));
}

std::vector<kernels::DType> SupportedDTypes(const Device& device) {
  std::set<kernels::DType> dtypes;
  for (const kernels::Kernel* kernel : device.kernels()) dtypes.insert(kernel->spec.dtype);
  return {dtypes.begin(), dtypes.end()};
}

std::vector<uint32_t> SupportedHeadDims(const Device& device, kernels::KvDType kv_dtype) {
  std::map<int32_t, std::set<kernels::DType>> dtypes_of;  // by head_dim
  for (const kernels::Kernel* kernel : device.kernels()) {
    const kernels::KernelSpec& spec = kernel->spec;
    if (spec.kv_dtype == kv_dtype && spec.precision == kernels::Precision::k16Bit) {
      dtypes_of[spec.head_dim].insert(spec.dtype);
    }
  }
  const size_t all = SupportedDTypes(device).size();
  std::vector<uint32_t> head_dims;
  for (const auto& [head_dim, dtypes] : dtypes_of) {
    if (dtypes.size() == all) head_dims.push_back(static_cast<uint32_t>(head_dim));
  }
  return head_dims;
}

}  // namespace flashcore::server
