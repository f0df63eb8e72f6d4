// Random inputs in device memory, several sets of them: launches that take them in turn find in L2
// what fits there, not what the one before left.
#ifndef FLASHCORE_KERNELS_BENCH_INPUT_SETS_H_
#define FLASHCORE_KERNELS_BENCH_INPUT_SETS_H_

#include <cstdint>
#include <vector>

#include "kernels/bench/named_shapes.h"
#include "kernels/smxx/cuda_raii.h"

namespace flashcore::kernels {

// Bytes that a launch has to move at least: Q, K, V and O, once.
int64_t SetBytes(const AttentionShape& shape);

// As many sets as launches, so far as they fit 4 GiB, and at least 2.
int ChooseSets(const AttentionShape& shape, int launches);

// Q, K and V are uniform in [-1, 1], FP8 K and V in [-m, m] with another m from 1/2 to 1 for every
// KV head; O is all ones, which is NaN. The pages of paged K/V are shuffled.
class InputSets {
 public:
  // Ends the program if the device cannot hold them. Filled in `stream`'s order.
  InputSets(const BenchShape& shape, int sets, cudaStream_t stream);

  // Of every set, over device memory.
  const std::vector<std::vector<Span>>& spans() const { return spans_; }
  // Host copy of the page table, [spans, pages of a span]; empty if K/V is dense.
  const std::vector<int32_t>& pages() const { return pages_; }

 private:
  void AddSet(const BenchShape& shape, uint32_t seed, cudaStream_t stream);
  void SendPages();
  void SendScales(int32_t kv_heads);

  std::vector<int32_t> pages_;
  DeviceMemory device_pages_;
  DeviceMemory kv_scales_;  // [kv_heads]; null unless K/V is FP8
  std::vector<DeviceMemory> tensors_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_INPUT_SETS_H_
