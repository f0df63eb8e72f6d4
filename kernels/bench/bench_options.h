// The command line of flashcore-kernel-bench.
#ifndef FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_
#define FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_

#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bench/named_shapes.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

inline constexpr char kBenchUsage[] =
    R"(flashcore-kernel-bench: checks and times the CUDA attention kernels.

  --shape=SHAPE         a name of --list, or
                        SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal]
                        [,window=LEFT:RIGHT][,paged]; repeatable; all of --list if none is given
  --arch=ARCH           kernel family: sm80 (default), sm90
  --dtype=DTYPE         float16 (default), bfloat16
  --kv_dtype=DTYPE      of K and V: same_as_query (default), float8_e4m3
  --accumulate=TYPE     float32 (default), float16
  --rounds=N            timed replays of a shape's graph (60)
  --launches=N          launches in the graph (20)
  --sets=N              input sets that the launches take in turn (as many as launches, at least 2,
                        otherwise at most 4 GiB of them)
  --json=FILE           write the results there, too
  --profile             launch each shape three times between profiler start and stop, time nothing
  --list                print the named shapes
  --help                print this

Exit status: 0; 1 if a shape failed, on a CUDA error and on a wrong command line; 2 without a GPU.
)";

struct BenchOptions {
  std::vector<BenchShape> shapes;  // with the dtypes asked for
  Arch arch = Arch::kSm80;
  DType dtype = DType::kFloat16;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Accumulate accumulate = Accumulate::kFloat32;
  int rounds = 60;
  int launches = 20;
  int sets = 0;  // 0: chosen from the launches and the bytes of a set
  std::string json_file;
  bool profile = false;
  bool list = false;
  bool help = false;
};

// Parses the arguments without the program's name. Returns what is wrong; empty if nothing is.
std::string ParseBenchOptions(const std::vector<std::string>& arguments, BenchOptions* options);

// What is asked of the registry for `shape`.
KernelSpec SpecFor(const BenchShape& shape, Arch arch, Accumulate accumulate);

// "sm80_float16_d64_float32": arch, dtype, head_dim and accumulate type; then the K/V's, if that is
// another ("_kv_float8_e4m3").
std::string KernelName(const KernelSpec& spec);

// Finds the enumerator of that name among `choices`. Returns what is wrong, if it is not there.
template <class Enum>
std::string ParseName(const std::string& name, std::initializer_list<Enum> choices, Enum* parsed) {
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
inline std::string ParseArch(const std::string& name, Arch* arch) {
  return ParseName(name, {Arch::kSm80, Arch::kSm90}, arch);
}
inline std::string ParseDType(const std::string& name, DType* dtype) {
  return ParseName(name, {DType::kFloat16, DType::kBFloat16}, dtype);
}
inline std::string ParseKvDType(const std::string& name, KvDType* kv_dtype) {
  return ParseName(name, {KvDType::kSameAsQuery, KvDType::kFloat8E4M3}, kv_dtype);
}
inline std::string ParseAccumulate(const std::string& name, Accumulate* accumulate) {
  return ParseName(name, {Accumulate::kFloat32, Accumulate::kFloat16}, accumulate);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_
