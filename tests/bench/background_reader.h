// A kernel that keeps reading device memory and leaves less of the DRAM's bandwidth to others: so a
// GPU with fast DRAM shows what an L2 window is worth on one with slow DRAM.
#ifndef FLASHCORE_TESTS_BENCH_BACKGROUND_READER_H_
#define FLASHCORE_TESTS_BENCH_BACKGROUND_READER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>

#include "kernels/cuda/cuda_raii.h"

namespace flashcore::kernels {

// Ends the program with status 1.
[[noreturn]] void Fail(const char* why);

// How hard to read.
struct BackgroundLoad {
  double share = 0;  // of full_gbps(), as asked
  int blocks = 0;    // 0: no reader
  double alone_gbps = 0;
};

// Reads 1 GiB round and round, past L1 and with L2's normal eviction priority, as the attention
// kernels read K/V. A block is one warp and waits for each 4 KiB before it asks for the next, so
// the number of blocks sets the rate. The blocks spread over the multiprocessors and leave room for
// an attention kernel. A CUDA error ends the program.
class BackgroundReader {
 public:
  // Measures the rates of several numbers of blocks, in less than 0.2 s.
  BackgroundReader();

  // The highest rate: that of the DRAM, because L2 holds a fraction of what is read.
  double full_gbps() const;

  // The load that reads `share` of full_gbps() while nothing else runs.
  BackgroundLoad LoadFor(double share);

  // Start, Mark twice and Stop are one run. It also ends by itself, after 0.5 s or more.
  void Start(int blocks);
  // Notes how much has been read when `stream` gets there. `which` is 0, then 1. Waits `delay_ns`
  // on the device first.
  void Mark(int which, cudaStream_t stream, uint64_t delay_ns = 0);
  // Ends the run. Both marks must have been reached. Returns the rate between them; 0 if the run
  // did not last from before the first mark until now.
  double Stop();

 private:
  double MeasureAlone(int blocks);

  CudaStream stream_;
  CudaStream control_;  // never waits for the reader
  DeviceMemory memory_;
  DeviceMemory state_;
  std::map<int, double> gbps_of_blocks_;  // alone
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_BACKGROUND_READER_H_
