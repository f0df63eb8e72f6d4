// One attention problem with its memory, plan and threads: what the CPU benchmarks run.
#ifndef FLASHCORE_KERNELS_BENCH_CPU_WORKLOAD_H_
#define FLASHCORE_KERNELS_BENCH_CPU_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bench/shape.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

struct WorkloadShape : AttentionShape {
  int32_t prefix_rows = 0;  // leading K/V rows that all spans have in common, whole pages
  bool share_items = true;  // whether the plan may share work items among them
};

// Q and O are NHD; K and V are paged, pages in order. Inputs are uniform in [-1, 1].
class Workload {
 public:
  Workload(const WorkloadShape& shape, int threads);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  void Run();  // plans and launches, as a lane does

  // Float32 copies as [spans][heads][rows][head_dim], for comparing with other libraries.
  void ExportInputs(float* query, float* key, float* value) const;
  void ExportOutput(float* output) const;

 private:
  const WorkloadShape shape_;
  const Kernel* kernel_;
  PlanOptions plan_options_;
  ThreadPool pool_;
  std::vector<uint16_t> query_, output_, kv_;
  std::vector<float> lse_;
  std::vector<int32_t> pages_;
  std::vector<Span> spans_;
  std::vector<float> workspace_;
  Plan plan_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_CPU_WORKLOAD_H_
