#include "kernels/registry.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/attention_cpu.h"
#include "kernels/cpu/tiles.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "kernels/sm80/attend.h"
#include "kernels/sm80/tiles.h"
#endif

namespace flashcore::kernels {
namespace {

constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

void AddCpu(DType dtype, KvDType kv_dtype, std::vector<Kernel>* kernels) {
  for (const int32_t head_dim : {32, 64, 96, 128, 256}) {
    kernels->push_back({{Arch::kCpu, dtype, head_dim, Accumulate::kFloat32, kv_dtype},
                        LaunchAttentionCpu,
                        CpuPlan()});
  }
}

#ifdef FLASHCORE_HAVE_CUDA
constexpr Accumulate kF32Sums = Accumulate::kFloat32, kF16Sums = Accumulate::kFloat16;
constexpr KvDType kSame = KvDType::kSameAsQuery, kE4M3 = KvDType::kFloat8E4M3,
                  kInt8 = KvDType::kInt8;

// Appends kernels that differ in head_dim.
template <Arch kArch, DType kDType, Accumulate kAccumulate, KvDType kKvDType, Precision kPrecision,
          int... kHeadDims>
void AddSm80(std::vector<Kernel>* kernels) {
  (kernels->push_back({{kArch, kDType, kHeadDims, kAccumulate, kKvDType, kPrecision},
                       sm80::Attend<kArch, kDType, kHeadDims, kAccumulate, kKvDType, kPrecision>,
                       sm80::PlanFor(kHeadDims, kArch, kKvDType, kPrecision)}),
   ...);
}

template <Arch kArch, Precision kPrecision>
void AddSm80Int8(std::vector<Kernel>* kernels) {
  AddSm80<kArch, kF16, kF32Sums, kInt8, kPrecision, 64, 128>(kernels);
  AddSm80<kArch, kBF16, kF32Sums, kInt8, kPrecision, 64, 128>(kernels);
}

template <Arch kArch>
void AddSm80(std::vector<Kernel>* kernels) {
  AddSm80<kArch, kF16, kF32Sums, kSame, Precision::k16Bit, 32, 64, 96, 128, 256>(kernels);
  AddSm80<kArch, kBF16, kF32Sums, kSame, Precision::k16Bit, 32, 64, 96, 128, 256>(kernels);
  AddSm80<kArch, kF16, kF16Sums, kSame, Precision::k16Bit, 32, 64, 96, 128, 256>(kernels);
  AddSm80<kArch, kF16, kF32Sums, kE4M3, Precision::k16Bit, 64, 128>(kernels);
  AddSm80<kArch, kBF16, kF32Sums, kE4M3, Precision::k16Bit, 64, 128>(kernels);
  AddSm80Int8<kArch, Precision::k16Bit>(kernels);
  AddSm80Int8<kArch, Precision::kInt8Qk>(kernels);
  AddSm80Int8<kArch, Precision::kInt8QkPv>(kernels);
}
#endif

std::vector<Kernel> MakeKernels() {
  std::vector<Kernel> kernels;
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3, KvDType::kInt8}) {
    AddCpu(kF16, kv_dtype, &kernels);
    AddCpu(kBF16, kv_dtype, &kernels);
  }
#ifdef FLASHCORE_HAVE_CUDA
  AddSm80<Arch::kLargeShared>(&kernels);
  AddSm80<Arch::kSmallShared>(&kernels);
#endif
  return kernels;
}

}  // namespace

std::optional<Arch> ArchOf(int compute_capability, size_t block_shared_bytes) {
  for (const CudaArch& least : kCudaArchs) {
    if (compute_capability >= least.compute_capability &&
        block_shared_bytes >= least.block_shared_bytes) {
      return least.arch;
    }
  }
  return std::nullopt;
}

const std::vector<Kernel>& AllKernels() {
  static const std::vector<Kernel>* const kKernels = new std::vector<Kernel>(MakeKernels());
  return *kKernels;
}

const Kernel* FindKernel(const KernelSpec& asked) {
  for (const Kernel& kernel : AllKernels()) {
    const KernelSpec& have = kernel.spec;
    if (have.arch == asked.arch && have.dtype == asked.dtype && have.kv_dtype == asked.kv_dtype &&
        have.precision == asked.precision && have.head_dim == asked.head_dim &&
        have.accumulate == asked.accumulate) {
      return &kernel;
    }
  }
  return nullptr;
}

std::string ExplainMissing(const KernelSpec& asked) {
  std::vector<KernelSpec> candidates;
  for (const Kernel& kernel : AllKernels()) candidates.push_back(kernel.spec);
  std::string reason;
  // Keeps the candidates whose field is as asked; if there are none, that is the reason.
  const auto narrow = [&](const char* field, const auto& text_of) {
    std::vector<KernelSpec> kept;
    std::vector<std::string> values;
    for (const KernelSpec& have : candidates) {
      const std::string value = text_of(have);
      if (value == text_of(asked)) kept.push_back(have);
      if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
    }
    if (reason.empty() && kept.empty()) {
      reason = std::string(field) + " " + text_of(asked) + " is not ";
      if (values.size() > 1) reason += "one of ";
      for (const std::string& value : values) reason += (&value == &values[0] ? "" : ", ") + value;
    }
    candidates = kept;
  };
  narrow("arch", [](const KernelSpec& spec) { return std::string(Name(spec.arch)); });
  narrow("dtype", [](const KernelSpec& spec) { return std::string(Name(spec.dtype)); });
  narrow("kv_dtype", [](const KernelSpec& spec) { return std::string(Name(spec.kv_dtype)); });
  narrow("precision", [](const KernelSpec& spec) { return std::string(Name(spec.precision)); });
  narrow("accumulate", [](const KernelSpec& spec) { return std::string(Name(spec.accumulate)); });
  narrow("head_dim", [](const KernelSpec& spec) { return std::to_string(spec.head_dim); });
  return reason.empty() ? "nothing is missing" : reason;
}

}  // namespace flashcore::kernels
