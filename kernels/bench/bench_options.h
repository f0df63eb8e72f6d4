// The command line of flashcore-kernel-bench.
#ifndef FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_
#define FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_

#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bench/shape.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

inline constexpr char kBenchUsage[] =
    R"(flashcore-kernel-bench: checks and times the CUDA attention kernels.

  --shape=SHAPE         a name of --list, or
                        SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal]
                        [,window=LEFT:RIGHT][,paged][,prefix=ROWS]; repeatable; default: all of
                        --list
  --arch=ARCH           kernel family: sm80 (default)
  --dtype=DTYPE         float16 (default), bfloat16
  --kv_dtype=DTYPE      of K and V: same_as_query (default), float8_e4m3
  --accumulate=TYPE     float32 (default), float16
  --rounds=N            timed replays of a shape's graph (60)
  --launches=N          launches in the graph (20)
  --sets=N              input sets that the launches take in turn (default: as many as launches, but
                        at most 4 GiB of them, and at least 2)
  --json=FILE           also write the results to FILE
  --profile             launch each shape three times between profiler start and stop, time nothing
  --list                print the named shapes
  --help                print this

Exit status: 0; 1 if a shape failed, on a CUDA error and on a wrong command line; 2 without a GPU.
)";

struct BenchOptions {
  std::vector<BenchShape> shapes;  // with dtype and kv_dtype set
  Arch arch = Arch::kSm80;
  DType dtype = DType::kFloat16;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Accumulate accumulate = Accumulate::kFloat32;
  int rounds = 60;
  int launches = 20;
  int sets = 0;  // 0: ChooseSets
  std::string json_file;
  bool profile = false;
  bool list = false;
  bool help = false;
};

// Parses the arguments without the program's name. Returns what is wrong; empty if nothing is.
std::string ParseBenchOptions(const std::vector<std::string>& arguments, BenchOptions* options);

// The kernel for `shape`.
KernelSpec SpecFor(const AttentionShape& shape, Arch arch, Accumulate accumulate);

// "sm80_float16_d64_float32": arch, dtype, head_dim, accumulate. FP8 K/V adds "_kv_float8_e4m3".
std::string KernelName(const KernelSpec& spec);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_BENCH_OPTIONS_H_
