// The command line of flashcore-kernel-bench.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_BENCH_OPTIONS_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_BENCH_OPTIONS_H_

#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/registry.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {

inline constexpr char kBenchUsage[] =
    R"(flashcore-kernel-bench: checks and times the CUDA attention kernels.

  --shape=SHAPE         a name of --list, or
                        SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal]
                        [,window=LEFT:RIGHT][,paged][,prefix=ROWS]; repeatable; default: all of
                        --list
  --arch=ARCH           kernel family: sm80 (default) or sm89
  --dtype=DTYPE         float16 (default), bfloat16
  --kv_dtype=DTYPE      of K and V: same_as_query (default); float8_e4m3, int8 (make shapes paged)
  --precision=PRECISION of products over INT8 K/V: 16bit (default), int8_qk, int8_qk_pv
  --accumulate=TYPE     float32 (default), float16
  --l2=STATE            cold: the launches take in turn input sets of three times the L2's size
                        together; warm: all take the same set, if it fits in half the L2;
                        both (default)
  --rounds=N            timed replays of a shape's graph (60)
  --launches=N          launches in the graph, at least (20); one or more of each set
  --json=FILE           also write the results to FILE
  --profile             launch each shape three times between profiler start and stop, time nothing
  --list                print the named shapes
  --help                print this

Exit status: 0; 1 if a shape failed, on a CUDA error and on a wrong command line; 2 without a GPU.
)";

// The part of a launch's inputs that is in L2: nothing, or all.
enum class L2State { kCold, kWarm };

// Parses an integer of at least 1. Returns what is wrong; empty if nothing is.
std::string ParseCount(const std::string& text, int* count);

// Parse the name of a CUDA family, of how K/V is stored, and of the precision of products. Return
// as above.
std::string ParseArch(const std::string& text, Arch* arch);
std::string ParseKvDType(const std::string& text, KvDType* kv_dtype);
std::string ParsePrecision(const std::string& text, Precision* precision);

// "cold" or "warm".
const char* Name(L2State state);

// Sets that launches have to take in turn to find their inputs in L2 or not. Cold: together at
// least three times `l2_bytes`, and at least 2. Warm: 1, or 0 if a set does not fit in half of
// `l2_bytes`.
int SetsFor(const AttentionShape& shape, L2State state, int64_t l2_bytes);

struct BenchOptions {
  std::vector<BenchShape> shapes;  // with dtype, kv_dtype and precision set
  Arch arch = Arch::kLargeShared;
  DType dtype = DType::kFloat16;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Precision precision = Precision::k16Bit;
  Accumulate accumulate = Accumulate::kFloat32;
  std::vector<L2State> l2 = {L2State::kCold, L2State::kWarm};
  int rounds = 60;
  int launches = 20;
  std::string json_file;
  bool profile = false;
  bool list = false;
  bool help = false;
};

// Parses the arguments without the program's name. Returns what is wrong; empty if nothing is.
std::string ParseBenchOptions(const std::vector<std::string>& arguments, BenchOptions* options);

// The kernel for `shape`.
KernelSpec SpecFor(const AttentionShape& shape, Arch arch, Accumulate accumulate);

// "sm80_float16_d64_float32": arch, dtype, head_dim, accumulate. 8-bit K/V adds "_kv_int8", its
// precision "_int8_qk" unless it is 16 bits.
std::string KernelName(const KernelSpec& spec);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_BENCH_OPTIONS_H_
