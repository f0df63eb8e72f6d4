#include "tests/bench/kernels/bench_options.h"

#include <algorithm>
#include <charconv>

namespace flashcore::kernels {
namespace {

constexpr int64_t kColdL2s = 3;  // sizes of the L2 that cold sets have together

template <class Enum>
std::string ParseName(const std::string& name, const std::vector<Enum>& choices, Enum* parsed) {
  std::string names;
  for (Enum choice : choices) {
    if (name == Name(choice)) {
      *parsed = choice;
      return "";
    }
    names += (names.empty() ? "" : ", ") + std::string(Name(choice));
  }
  return "'" + name + "' is not one of " + names;
}

std::string ParseL2(const std::string& value, std::vector<L2State>* states) {
  if (value == "both") {
    *states = {L2State::kCold, L2State::kWarm};
    return "";
  }
  L2State state = L2State::kCold;
  const std::string error = ParseName(value, {L2State::kCold, L2State::kWarm}, &state);
  if (!error.empty()) return error + ", both";
  *states = {state};
  return "";
}

// The option that `flag` switches on; null if there is none.
bool* SwitchOf(const std::string& flag, BenchOptions* options) {
  if (flag == "--list") return &options->list;
  if (flag == "--profile") return &options->profile;
  return flag == "--help" ? &options->help : nullptr;
}

std::string ParseFlag(const std::string& flag, const std::string& value, BenchOptions* options) {
  if (flag == "--arch") return ParseArch(value, &options->arch);
  if (flag == "--dtype") {
    return ParseName(value, {DType::kFloat16, DType::kBFloat16}, &options->dtype);
  }
  if (flag == "--kv_dtype") return ParseKvDType(value, &options->kv_dtype);
  if (flag == "--precision") return ParsePrecision(value, &options->precision);
  if (flag == "--accumulate") {
    return ParseName(value, {Accumulate::kFloat32, Accumulate::kFloat16}, &options->accumulate);
  }
  if (flag == "--rounds") return ParseCount(value, &options->rounds);
  if (flag == "--launches") return ParseCount(value, &options->launches);
  if (flag == "--l2") return ParseL2(value, &options->l2);
  if (flag == "--shape") return ParseShape(value, &options->shapes.emplace_back());
  if (flag == "--json") {
    options->json_file = value;
    return value.empty() ? "no file name" : "";
  }
  return "no such flag";
}

}  // namespace

std::string ParseArch(const std::string& text, Arch* arch) {
  std::vector<Arch> archs;
  for (const CudaArch& cuda : kCudaArchs) archs.push_back(cuda.arch);
  return ParseName(text, archs, arch);
}

std::string ParseKvDType(const std::string& text, KvDType* kv_dtype) {
  return ParseName(text, {KvDType::kSameAsQuery, KvDType::kFloat8E4M3, KvDType::kInt8}, kv_dtype);
}

std::string ParsePrecision(const std::string& text, Precision* precision) {
  return ParseName(text, {Precision::k16Bit, Precision::kInt8Qk, Precision::kInt8QkPv}, precision);
}

std::string ParseCount(const std::string& text, int* count) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *count);
  if (error == std::errc() && stop == end && *count >= 1) return "";
  return "'" + text + "' is not a positive integer";
}

const char* Name(L2State state) { return state == L2State::kCold ? "cold" : "warm"; }

int SetsFor(const AttentionShape& shape, L2State state, int64_t l2_bytes) {
  const int64_t bytes = SetBytes(shape);
  if (state == L2State::kWarm) return 2 * bytes <= l2_bytes ? 1 : 0;
  return static_cast<int>(std::max<int64_t>(2, (kColdL2s * l2_bytes + bytes - 1) / bytes));
}

std::string ParseBenchOptions(const std::vector<std::string>& arguments, BenchOptions* options) {
  *options = {};
  for (const std::string& argument : arguments) {
    const size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    if (equals != std::string::npos) {
      const std::string error = ParseFlag(flag, argument.substr(equals + 1), options);
      if (!error.empty()) return flag + ": " + error;
    } else if (bool* on = SwitchOf(flag, options)) {
      *on = true;
    } else {
      return flag + ": no such flag";
    }
  }
  if (options->shapes.empty()) {
    for (const NamedShape& named : kNamedShapes) {
      ParseShape(named.name, &options->shapes.emplace_back());
    }
  }
  for (BenchShape& shape : options->shapes) {
    shape.attention.dtype = options->dtype;
    shape.attention.kv_dtype = options->kv_dtype;
    shape.attention.precision = options->precision;
    if (Is8Bit(options->kv_dtype)) shape.attention.paged = true;
  }
  return "";
}

KernelSpec SpecFor(const AttentionShape& shape, Arch arch, Accumulate accumulate) {
  return {arch, shape.dtype, shape.head_dim, accumulate, shape.kv_dtype, shape.precision};
}

std::string KernelName(const KernelSpec& spec) {
  std::string name = std::string(Name(spec.arch)) + "_" + Name(spec.dtype) + "_d" +
                     std::to_string(spec.head_dim) + "_" + Name(spec.accumulate);
  if (Is8Bit(spec.kv_dtype)) name += std::string("_kv_") + Name(spec.kv_dtype);
  if (spec.precision != Precision::k16Bit) name += std::string("_") + Name(spec.precision);
  return name;
}

}  // namespace flashcore::kernels
