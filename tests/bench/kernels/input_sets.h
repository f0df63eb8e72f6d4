// Random inputs in device memory.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_INPUT_SETS_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_INPUT_SETS_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda_raii.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {

// Q, K and V are uniform in [-1, 1]. 8-bit K and V: see Fill8BitPages. O has all bits set, which is
// NaN. Page numbers are shuffled.
class InputSets {
 public:
  // Ends the program if the device cannot hold them. Filled in the order of `stream`.
  InputSets(const AttentionShape& shape, int sets, cudaStream_t stream);

  // [set][span], over device memory.
  const std::vector<std::vector<Span>>& spans() const { return spans_; }

  // A copy of a set in host memory.
  struct HostSet {
    std::vector<std::byte> memory;
    std::vector<Span> spans;  // over `memory`, and over the page table of InputSets
  };
  HostSet CopyToHost(int set) const;

 private:
  void AddSet(uint32_t seed, cudaStream_t stream);
  Tensors TensorsAt(std::byte* base) const;

  const AttentionShape shape_;
  std::vector<int32_t> pages_;  // [spans, pages of a span]; empty if K/V is dense
  size_t key_offset_ = 0, value_offset_ = 0, set_bytes_ = 0;  // in a set: Q, O, K, V
  std::vector<DeviceMemory> sets_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_INPUT_SETS_H_
