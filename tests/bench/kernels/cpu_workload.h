// One attention problem with its memory, plan and threads, for the CPU benchmarks.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_CPU_WORKLOAD_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_CPU_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/registry.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {

// K and V are always paged, pages in ascending order. Inputs are uniform in [-1, 1].
class Workload {
 public:
  // cascade: whether the plan may share work items among spans with a shared prefix.
  Workload(const AttentionShape& shape, int threads, bool cascade = true);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  void Run();  // plans and launches, as the server does

  const AttentionShape& shape() const { return shape_; }
  const std::vector<Span>& spans() const { return spans_; }

 private:
  const AttentionShape shape_;
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

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_CPU_WORKLOAD_H_
