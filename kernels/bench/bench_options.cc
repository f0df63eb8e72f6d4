#include "kernels/bench/bench_options.h"

#include <charconv>

namespace flashcore::kernels {
namespace {

std::string ParseCount(const std::string& text, int* count) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *count);
  if (error == std::errc() && stop == end && *count >= 1) return "";
  return "'" + text + "' is no number from 1 on";
}

std::string ParseSwitch(const std::string& flag, BenchOptions* options) {
  if (flag == "--list") {
    options->list = true;
  } else if (flag == "--profile") {
    options->profile = true;
  } else if (flag == "--help") {
    options->help = true;
  } else {
    return "no such flag";
  }
  return "";
}

std::string ParseFlag(const std::string& flag, const std::string& value, BenchOptions* options) {
  if (flag == "--arch") return ParseArch(value, &options->arch);
  if (flag == "--dtype") return ParseDType(value, &options->dtype);
  if (flag == "--kv_dtype") return ParseKvDType(value, &options->kv_dtype);
  if (flag == "--accumulate") return ParseAccumulate(value, &options->accumulate);
  if (flag == "--rounds") return ParseCount(value, &options->rounds);
  if (flag == "--launches") return ParseCount(value, &options->launches);
  if (flag == "--sets") return ParseCount(value, &options->sets);
  if (flag == "--shape") return ParseShape(value, &options->shapes.emplace_back());
  if (flag == "--json") {
    options->json_file = value;
    return value.empty() ? "no file name" : "";
  }
  return "no such flag";
}

}  // namespace

std::string ParseBenchOptions(const std::vector<std::string>& arguments, BenchOptions* options) {
  *options = {};
  for (const std::string& argument : arguments) {
    const size_t equals = argument.find('=');
    const std::string flag = argument.substr(0, equals);
    const std::string error = equals == std::string::npos
                                  ? ParseSwitch(flag, options)
                                  : ParseFlag(flag, argument.substr(equals + 1), options);
    if (!error.empty()) return flag + ": " + error;
  }
  if (options->shapes.empty()) {
    for (const NamedShape& named : NamedShapes()) {
      ParseShape(named.name, &options->shapes.emplace_back());
    }
  }
  for (BenchShape& shape : options->shapes) {
    shape.attention.dtype = options->dtype;
    shape.attention.kv_dtype = options->kv_dtype;
  }
  return "";
}

KernelSpec SpecFor(const BenchShape& shape, Arch arch, Accumulate accumulate) {
  const AttentionShape& attention = shape.attention;
  uint32_t features = 0;
  if (shape.paged) features |= kFeaturePagedKv;
  if (!(attention.mask == Mask::None())) features |= kFeatureMask;
  return {arch, attention.dtype, attention.head_dim, accumulate, features, attention.kv_dtype};
}

std::string KernelName(const KernelSpec& spec) {
  std::string name = std::string(Name(spec.arch)) + "_" + Name(spec.dtype) + "_d" +
                     std::to_string(spec.head_dim) + "_" + Name(spec.accumulate);
  if (spec.kv_dtype != KvDType::kSameAsQuery) name += std::string("_kv_") + Name(spec.kv_dtype);
  return name;
}

}  // namespace flashcore::kernels
