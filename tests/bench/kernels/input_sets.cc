#include "tests/bench/kernels/input_sets.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/bench/kernels/device_kernels.h"

namespace flashcore::kernels {
namespace {

constexpr size_t kTensorAlignment = 256;

std::vector<int32_t> ShuffledPageTable(const AttentionShape& shape) {
  std::vector<int32_t> pages = PageTable(shape);
  std::vector<int32_t> shuffled(pages.back() + 1);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(1));
  for (int32_t& page : pages) page = shuffled[page];
  return pages;
}

// Bytes of K and V, including the unused rows of last pages.
size_t AllocatedKvBytes(AttentionShape shape) {
  if (shape.paged) shape.kv_rows = PagesFor(shape.kv_rows) * kPageTokens;
  return StoredKvBytes(shape);
}

size_t Aligned(size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

}  // namespace

InputSets::InputSets(const AttentionShape& shape, int sets, cudaStream_t stream) : shape_(shape) {
  if (shape.paged) pages_ = ShuffledPageTable(shape);
  key_offset_ = 2 * Aligned(QueryBytes(shape));
  value_offset_ = key_offset_ + Aligned(AllocatedKvBytes(shape) / 2);
  set_bytes_ = value_offset_ + Aligned(AllocatedKvBytes(shape) / 2);
  for (int set = 0; set < sets; ++set) AddSet(set, stream);
}

Tensors InputSets::TensorsAt(std::byte* base) const {
  Tensors tensors;
  tensors.query = base;
  tensors.output = base + key_offset_ / 2;
  tensors.key = base + key_offset_;
  tensors.value = base + value_offset_;
  if (shape_.paged) tensors.pages = pages_.data();
  return tensors;
}

void InputSets::AddSet(uint32_t seed, cudaStream_t stream) {
  DeviceMemory& memory = sets_.emplace_back();
  Check(cudaMalloc(memory.out(), set_bytes_), "allocate an input set");
  auto* base = static_cast<std::byte*>(memory.get());
  const Tensors tensors = TensorsAt(base);
  Check(FillUniform(shape_.dtype, seed, set_bytes_ / sizeof(uint16_t), base, stream),
        "fill an input set");
  if (Is8Bit(shape_.kv_dtype)) {
    Check(Fill8BitPages(shape_.kv_dtype, ~seed, shape_.head_dim, set_bytes_ - key_offset_,
                        base + key_offset_, stream),
          "fill 8-bit K and V");
  }
  Check(cudaMemsetAsync(tensors.output, 0xff, QueryBytes(shape_), stream), "poison an output");
  spans_.push_back(MakeSpans(shape_, tensors));
}

InputSets::HostSet InputSets::CopyToHost(int set) const {
  HostSet host;
  host.memory.resize(set_bytes_);
  Check(cudaMemcpy(host.memory.data(), sets_[set].get(), set_bytes_, cudaMemcpyDeviceToHost),
        "copy an input set to the host");
  host.spans = MakeSpans(shape_, TensorsAt(host.memory.data()));
  return host;
}

}  // namespace flashcore::kernels
