// Decode over hot K/V while other K/V streams past, with and without an L2 access-policy window.
#ifndef FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_
#define FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/bench/input_sets.h"
#include "kernels/bench/kernel_run.h"
#include "kernels/bench/timing.h"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::kernels {

// Of the L2, set aside for a window over all hot K/V: nothing (and no window), all that the device
// allows, or half of that.
enum class L2Mode { kWithout, kWith, kHalf };

// What is read between two launches over the hot K/V. Not concurrent: by launches on the same
// stream, in between. Concurrent: by launches on two other streams, which start when the hot launch
// does; with none in between these streams never pause, and neither does the hot one.
struct ColdTraffic {
  size_t bytes = 0;  // a multiple of kColdLaunchBytes
  bool concurrent = false;
};

// One decode launch over 1 or more hot sequences of 4096 tokens, 32 query and 8 KV heads of
// head_dim 128 in FP16, 16 MiB each, by the sm80 kernel; and launches over cold ones, 4 at a time
// out of 32. A CUDA error ends the program. Leaves the device's set-aside as the last mode had it.
class L2Experiment {
 public:
  static constexpr size_t kSequenceBytes = size_t{16} << 20;
  static constexpr size_t kColdLaunchBytes = 4 * kSequenceBytes;

  // Ends the program if the kernel is not right.
  explicit L2Experiment(int hot_sequences);

  struct Granted {
    size_t set_aside_bytes = 0;  // as the driver says
    float hit_ratio = 0;         // of the window
  };
  Granted SetMode(L2Mode mode);

  // Device time of one hot launch, from event to event, over `repeats` of them. Ends the program if
  // the output's bits are not those of the first launch.
  Percentiles Time(const ColdTraffic& traffic, int repeats);

  // `launches` hot ones, each by itself between profiler start and stop, with `cold_bytes` read
  // before each of them on the same stream.
  void Profile(size_t cold_bytes, int launches);

  size_t hot_bytes() const { return hot_sequences_ * kSequenceBytes; }

 private:
  static constexpr int kColdStreams = 2;
  static constexpr int kBatch = 21;  // repeats that are enqueued at once; the first is not counted

  void RunBatch(const ColdTraffic& traffic);
  void Repeat(const ColdTraffic& traffic, int i);
  void LaunchHot(int i);
  void LaunchColdBetween(size_t bytes);
  void LaunchColdBeside(int launches);
  void Synchronise();
  std::vector<std::byte> HotOutput() const;

  const size_t hot_sequences_;
  CudaStream hot_stream_;
  std::array<CudaStream, kColdStreams> cold_streams_;
  std::array<CudaEvent, kBatch> begin_;
  std::array<CudaEvent, kBatch> end_;
  CudaEvent lead_;
  std::array<CudaEvent, kColdStreams> cold_done_;

  InputSets hot_inputs_;
  InputSets cold_inputs_;
  KernelRun hot_run_;
  std::array<KernelRun, kColdStreams> cold_runs_;  // each over its share of the cold sets
  int next_cold_ = 0;                              // launch, of all
  std::vector<std::byte> output_;                  // of the first hot launch
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_L2_EXPERIMENT_H_
