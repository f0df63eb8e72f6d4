// Decode over hot K/V while other reads stream past, with and without an L2 access-policy window.
#ifndef FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_
#define FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/cuda/cuda_raii.h"
#include "tests/bench/background_reader.h"
#include "tests/bench/kernels/input_sets.h"
#include "tests/bench/kernels/kernel_run.h"
#include "tests/bench/kernels/timing.h"

namespace flashcore::kernels {

// The other readers of device memory.
struct Traffic {
  size_t cold_bytes = 0;  // before each hot launch, on its stream; a multiple of kColdLaunchBytes
  int background_blocks = 0;  // of the BackgroundReader, all the time
};

// A decode launch over hot sequences of 4096 tokens, or one shorter sequence, with 32 query and 8
// KV heads of head_dim 128 in FP16, by the sm80 kernel; and launches over cold ones, 64 MiB at a
// time out of 512 MiB. A CUDA error ends the program. Leaves the device's set-aside as the last
// SetWindow had it.
class L2Experiment {
 public:
  static constexpr size_t kMaxSequenceBytes = size_t{16} << 20;
  static constexpr size_t kColdLaunchBytes = 4 * kMaxSequenceBytes;

  // `hot_bytes` is a multiple of 1 MiB, and of kMaxSequenceBytes if it is more than that.
  // `background` may be null if no traffic has it, and outlives this. Ends the program if the
  // kernel is not right.
  L2Experiment(size_t hot_bytes, BackgroundReader* background);

  struct Granted {
    size_t set_aside_bytes = 0;  // as the driver says
    float hit_ratio = 0;         // of the window
  };
  // A window over all hot K/V, with as much of the L2 set aside as it takes, or as the device
  // allows. Off: no window, and nothing set aside.
  Granted SetWindow(bool on);

  struct Times {
    Percentiles us;              // of one hot launch, from event to event
    double background_gbps = 0;  // of the background reader beside hot and cold launches
  };
  // Times `repeats` hot launches. Ends the program if the output's bits are not those of the first
  // launch.
  Times Time(const Traffic& traffic, int repeats);

  // `launches` hot ones, each by itself between profiler start and stop, with `cold_bytes` read
  // before each of them on the same stream.
  void Profile(size_t cold_bytes, int launches);

  size_t hot_bytes() const { return hot_bytes_; }

 private:
  static constexpr int kBatch = 21;  // repeats that are enqueued at once; the first is not counted

  double RunBatch(const Traffic& traffic);
  void LaunchHot(int i);
  void LaunchCold(size_t bytes);
  void Synchronise();
  std::vector<std::byte> HotOutput() const;

  const size_t hot_bytes_;
  BackgroundReader* const background_;
  CudaStream stream_;
  std::array<CudaEvent, kBatch> begin_;
  std::array<CudaEvent, kBatch> end_;

  InputSets hot_inputs_;
  InputSets cold_inputs_;
  KernelRun hot_run_;
  KernelRun cold_run_;
  int next_cold_ = 0;              // launch, of all
  std::vector<std::byte> output_;  // of the first hot launch
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_
