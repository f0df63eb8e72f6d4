// What flashcore-kernel-bench prints: a table, and a JSON list for other programs.
#ifndef FLASHCORE_KERNELS_BENCH_REPORT_H_
#define FLASHCORE_KERNELS_BENCH_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/bench/accuracy.h"
#include "kernels/bench/timing.h"

namespace flashcore::kernels {

struct Device {
  std::string name;
  int multiprocessors = 0;
  int clock_khz = 0;  // the highest that its SMs run at
  int l2_bytes = 0;
};

struct Result {
  std::string shape;
  std::string kernel;
  Percentiles us;
  double flops = 0;
  int64_t set_bytes = 0;  // Q, K, V and O, once
  int sets = 0;
  Accuracy accuracy;

  double tflops() const { return flops / us.p50 * 1e-6; }
  double gbps() const { return static_cast<double>(set_bytes) / us.p50 * 1e-3; }
};

void PrintHeader(const Device& device, const Ceilings& ceilings);
void PrintResult(const Result& result, const Device& device, const Ceilings& ceilings);
void PrintFailure(const std::string& shape, const std::string& why);

// Writes the list; returns whether that worked.
bool WriteJson(const std::string& file, const std::vector<Result>& results, const Device& device,
               const Ceilings& ceilings);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_REPORT_H_
