#include "kernels/registry.h"

#include <algorithm>
#include <array>

#include "kernels/cpu/attention_cpu.h"
#include "kernels/tile_config.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "kernels/sm80/attention_sm80.h"
#endif

namespace flashcore::kernels {
namespace {

constexpr uint32_t kAllFeatures = kFeaturePagedKv | kFeatureMask | kFeatureLse;

Kernel CpuKernel(DType dtype, int32_t head_dim) {
  return {{Arch::kCpu, dtype, head_dim, Accumulate::kFloat32, kAllFeatures},
          LaunchAttentionCpu,
          CpuPlan()};
}

#ifdef FLASHCORE_HAVE_CUDA
Kernel Sm80Kernel(DType dtype, int32_t head_dim) {
  return {{Arch::kSm80, dtype, head_dim, Accumulate::kFloat32, kAllFeatures},
          LaunchAttentionSm80,
          Sm80Plan(head_dim)};
}

Kernel Sm80Float16Kernel(int32_t head_dim) {
  return {{Arch::kSm80, DType::kFloat16, head_dim, Accumulate::kFloat16, kAllFeatures},
          LaunchAttentionSm80Float16,
          Sm80Plan(head_dim)};
}

Kernel Sm80Fp8Kernel(int32_t head_dim) {
  return {{Arch::kSm80, DType::kFloat16, head_dim, Accumulate::kFloat32, kAllFeatures,
           KvDType::kFloat8E4M3},
          LaunchAttentionSm80,
          Sm80Fp8Plan(head_dim)};
}
#endif

std::vector<Kernel> MakeKernels() {
  return {
      CpuKernel(DType::kFloat16, 32),
      CpuKernel(DType::kFloat16, 64),
      CpuKernel(DType::kFloat16, 96),
      CpuKernel(DType::kFloat16, 128),
      CpuKernel(DType::kFloat16, 256),
      CpuKernel(DType::kBFloat16, 32),
      CpuKernel(DType::kBFloat16, 64),
      CpuKernel(DType::kBFloat16, 96),
      CpuKernel(DType::kBFloat16, 128),
      CpuKernel(DType::kBFloat16, 256),
#ifdef FLASHCORE_HAVE_CUDA
      Sm80Kernel(DType::kFloat16, 32),
      Sm80Kernel(DType::kFloat16, 64),
      Sm80Kernel(DType::kFloat16, 96),
      Sm80Kernel(DType::kFloat16, 128),
      Sm80Kernel(DType::kFloat16, 256),
      Sm80Kernel(DType::kBFloat16, 32),
      Sm80Kernel(DType::kBFloat16, 64),
      Sm80Kernel(DType::kBFloat16, 96),
      Sm80Kernel(DType::kBFloat16, 128),
      Sm80Kernel(DType::kBFloat16, 256),
      Sm80Float16Kernel(32),
      Sm80Float16Kernel(64),
      Sm80Float16Kernel(96),
      Sm80Float16Kernel(128),
      Sm80Float16Kernel(256),
      Sm80Fp8Kernel(64),
      Sm80Fp8Kernel(128),
#endif
  };
}

// One thing that a caller asks for: which kernels have it, and how it is called.
struct Criterion {
  const char* what;
  std::string asked;
  bool (*matches)(const KernelSpec& have, const KernelSpec& asked);
  std::string (*value)(const KernelSpec& have);
};

// In the order in which they narrow the choice.
std::array<Criterion, 5> Criteria(const KernelSpec& asked) {
  return {{
      {"arch", Name(asked.arch),
       [](const KernelSpec& have, const KernelSpec& want) { return have.arch == want.arch; },
       [](const KernelSpec& have) { return std::string(Name(have.arch)); }},
      {"dtype", Name(asked.dtype),
       [](const KernelSpec& have, const KernelSpec& want) { return have.dtype == want.dtype; },
       [](const KernelSpec& have) { return std::string(Name(have.dtype)); }},
      {"kv_dtype", Name(asked.kv_dtype),
       [](const KernelSpec& have, const KernelSpec& want) {
         return have.kv_dtype == want.kv_dtype;
       },
       [](const KernelSpec& have) { return std::string(Name(have.kv_dtype)); }},
      {"accumulate", Name(asked.accumulate),
       [](const KernelSpec& have, const KernelSpec& want) {
         return have.accumulate == want.accumulate;
       },
       [](const KernelSpec& have) { return std::string(Name(have.accumulate)); }},
      {"head_dim", std::to_string(asked.head_dim),
       [](const KernelSpec& have, const KernelSpec& want) {
         return have.head_dim == want.head_dim;
       },
       [](const KernelSpec& have) { return std::to_string(have.head_dim); }},
  }};
}

std::string Join(const std::vector<std::string>& words) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : ", ") + word;
  return joined;
}

// "dtype bfloat16 is not float16", "head_dim 80 is not one of 32, 64".
std::string NotOneOf(const Criterion& criterion, const std::vector<const KernelSpec*>& candidates) {
  std::vector<std::string> values;
  for (const KernelSpec* have : candidates) {
    const std::string value = criterion.value(*have);
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  return std::string(criterion.what) + " " + criterion.asked + " is not " +
         (values.size() > 1 ? "one of " : "") + Join(values);
}

}  // namespace

const std::vector<Kernel>& AllKernels() {
  static const std::vector<Kernel>* const kKernels = new std::vector<Kernel>(MakeKernels());
  return *kKernels;
}

const Kernel* FindKernel(const KernelSpec& asked) {
  for (const Kernel& kernel : AllKernels()) {
    const KernelSpec& have = kernel.spec;
    if (have.arch == asked.arch && have.dtype == asked.dtype && have.kv_dtype == asked.kv_dtype &&
        have.head_dim == asked.head_dim && have.accumulate == asked.accumulate &&
        (have.features & asked.features) == asked.features) {
      return &kernel;
    }
  }
  return nullptr;
}

std::string ExplainMissing(const KernelSpec& asked) {
  std::vector<const KernelSpec*> candidates;
  for (const Kernel& kernel : AllKernels()) candidates.push_back(&kernel.spec);
  for (const Criterion& criterion : Criteria(asked)) {
    std::vector<const KernelSpec*> kept;
    for (const KernelSpec* have : candidates) {
      if (criterion.matches(*have, asked)) kept.push_back(have);
    }
    if (kept.empty()) return NotOneOf(criterion, candidates);
    candidates = kept;
  }
  const uint32_t missing = asked.features & ~candidates.front()->features;
  if (missing == 0) return "nothing is missing";
  return "features " + Join(FeatureNames(missing)) + " are not among " +
         Join(FeatureNames(candidates.front()->features));
}

const char* Name(Arch arch) {
  switch (arch) {
    case Arch::kCpu:
      return "cpu";
    case Arch::kSm80:
      return "sm80";
    case Arch::kSm90:
      return "sm90";
  }
  return "unknown";
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

const char* Name(KvDType kv_dtype) {
  switch (kv_dtype) {
    case KvDType::kSameAsQuery:
      return "same_as_query";
    case KvDType::kFloat8E4M3:
      return "float8_e4m3";
  }
  return "unknown";
}

const char* Name(Accumulate accumulate) {
  switch (accumulate) {
    case Accumulate::kFloat32:
      return "float32";
    case Accumulate::kFloat16:
      return "float16";
  }
  return "unknown";
}

std::vector<std::string> FeatureNames(uint32_t features) {
  std::vector<std::string> names;
  if (features & kFeaturePagedKv) names.push_back("paged_kv");
  if (features & kFeatureMask) names.push_back("mask");
  if (features & kFeatureLse) names.push_back("lse");
  if (features & ~kAllFeatures) names.push_back("unknown");
  return names;
}

}  // namespace flashcore::kernels
