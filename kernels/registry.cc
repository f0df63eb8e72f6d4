#include "kernels/registry.h"

#include <algorithm>
#include <initializer_list>

#include "kernels/cpu/attention_cpu.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "kernels/sm80/attention_sm80.h"
#endif

namespace flashcore::kernels {
namespace {

PlanOptions PlanFor(const KernelSpec& spec) {
  if (spec.arch == Arch::kCpu) return CpuPlan();
  const SharedSize shared = SharedSizeOf(spec.arch);
  return spec.kv_dtype == KvDType::kFloat8E4M3 ? Sm80Fp8Plan(spec.head_dim, shared)
                                               : Sm80Plan(spec.head_dim, shared);
}

// Appends kernels of one launcher: `spec` with each of `head_dims`.
void Add(KernelSpec spec, Launcher launcher, std::initializer_list<int32_t> head_dims,
         std::vector<Kernel>* kernels) {
  for (const int32_t head_dim : head_dims) {
    spec.head_dim = head_dim;
    kernels->push_back({spec, launcher, PlanFor(spec)});
  }
}

std::vector<Kernel> MakeKernels() {
  constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
  std::vector<Kernel> kernels;
  Add({Arch::kCpu, kF16}, LaunchAttentionCpu, {32, 64, 96, 128, 256}, &kernels);
  Add({Arch::kCpu, kBF16}, LaunchAttentionCpu, {32, 64, 96, 128, 256}, &kernels);
#ifdef FLASHCORE_HAVE_CUDA
  constexpr Accumulate kF32Sums = Accumulate::kFloat32, kF16Sums = Accumulate::kFloat16;
  for (const Arch arch : {Arch::kSm80, Arch::kSm89}) {
    Add({arch, kF16}, LaunchAttentionSm80, {32, 64, 96, 128, 256}, &kernels);
    Add({arch, kBF16}, LaunchAttentionSm80, {32, 64, 96, 128, 256}, &kernels);
    Add({arch, kF16, 0, kF16Sums}, LaunchAttentionSm80, {32, 64, 96, 128, 256}, &kernels);
    Add({arch, kF16, 0, kF32Sums, KvDType::kFloat8E4M3}, LaunchAttentionSm80, {64, 128}, &kernels);
  }
#endif
  return kernels;
}

}  // namespace

Arch ArchOf(size_t block_shared_bytes) {
  return block_shared_bytes < kLargeSharedBytes ? Arch::kSm89 : Arch::kSm80;
}

SharedSize SharedSizeOf(Arch arch) {
  return arch == Arch::kSm89 ? SharedSize::kSmall : SharedSize::kLarge;
}

const std::vector<Kernel>& AllKernels() {
  static const std::vector<Kernel>* const kKernels = new std::vector<Kernel>(MakeKernels());
  return *kKernels;
}

const Kernel* FindKernel(const KernelSpec& asked) {
  for (const Kernel& kernel : AllKernels()) {
    const KernelSpec& have = kernel.spec;
    if (have.arch == asked.arch && have.dtype == asked.dtype && have.kv_dtype == asked.kv_dtype &&
        have.head_dim == asked.head_dim && have.accumulate == asked.accumulate) {
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
  narrow("accumulate", [](const KernelSpec& spec) { return std::string(Name(spec.accumulate)); });
  narrow("head_dim", [](const KernelSpec& spec) { return std::to_string(spec.head_dim); });
  return reason.empty() ? "nothing is missing" : reason;
}

const char* Name(Arch arch) {
  switch (arch) {
    case Arch::kCpu:
      return "cpu";
    case Arch::kSm80:
      return "sm80";
    case Arch::kSm89:
      return "sm89";
  }
  return "unknown";
}

const char* Name(DType dtype) { return dtype == DType::kFloat16 ? "float16" : "bfloat16"; }

const char* Name(KvDType kv_dtype) {
  return kv_dtype == KvDType::kSameAsQuery ? "same_as_query" : "float8_e4m3";
}

const char* Name(Accumulate accumulate) {
  return accumulate == Accumulate::kFloat32 ? "float32" : "float16";
}

}  // namespace flashcore::kernels
