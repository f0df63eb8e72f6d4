#include "kernels/bench/input_sets.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/bench/cuda_check.h"
#include "kernels/bench/device_kernels.h"
#include "kernels/bench/device_spans.h"
#include "kernels/fp8.h"

namespace flashcore::kernels {
namespace {

constexpr int64_t kMaxBytes = int64_t{4} << 30;  // of all sets of a shape
constexpr size_t kTensorAlignment = 256;

std::vector<int32_t> ShuffledPages(const AttentionShape& shape) {
  std::vector<int32_t> pages(int64_t{shape.spans} * PagesFor(shape.kv_rows));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  return pages;
}

// Bytes of K and V with the unused rows of last pages.
size_t AllocatedKvBytes(const BenchShape& shape) {
  AttentionShape allocated = shape.attention;
  if (shape.paged) allocated.kv_rows = PagesFor(allocated.kv_rows) * kPageTokens;
  return KvBytes(allocated);
}

size_t Aligned(size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

}  // namespace

int64_t SetBytes(const AttentionShape& shape) { return 2 * QueryBytes(shape) + KvBytes(shape); }

int ChooseSets(const AttentionShape& shape, int launches) {
  const int64_t fitting = kMaxBytes / SetBytes(shape);
  return static_cast<int>(std::max<int64_t>(2, std::min<int64_t>(launches, fitting)));
}

InputSets::InputSets(const BenchShape& shape, int sets, cudaStream_t stream) {
  if (shape.paged) {
    pages_ = ShuffledPages(shape.attention);
    SendPages();
  }
  if (shape.attention.kv_dtype == KvDType::kFloat8E4M3) SendScales(shape.attention.num_kv_heads);
  for (int set = 0; set < sets; ++set) AddSet(shape, set, stream);
}

void InputSets::SendPages() {
  const size_t bytes = pages_.size() * sizeof(int32_t);
  Check(cudaMalloc(device_pages_.out(), bytes), "allocate the page table");
  Check(cudaMemcpy(device_pages_.get(), pages_.data(), bytes, cudaMemcpyHostToDevice),
        "send the page table");
}

void InputSets::SendScales(int32_t kv_heads) {
  std::vector<float> scales;
  for (int32_t h = 0; h < kv_heads; ++h) scales.push_back(E4M3Scale(1 - 0.5f * h / kv_heads));
  const size_t bytes = scales.size() * sizeof(float);
  Check(cudaMalloc(kv_scales_.out(), bytes), "allocate the scales");
  Check(cudaMemcpy(kv_scales_.get(), scales.data(), bytes, cudaMemcpyHostToDevice),
        "send the scales");
}

// One allocation: Q, O, then K and V.
void InputSets::AddSet(const BenchShape& shape, uint32_t seed, cudaStream_t stream) {
  const size_t query_bytes = QueryBytes(shape.attention);
  const size_t kv_bytes = AllocatedKvBytes(shape);
  const size_t output_at = Aligned(query_bytes);
  const size_t key_at = 2 * output_at;
  const size_t value_at = key_at + Aligned(kv_bytes / 2);
  const size_t bytes = value_at + Aligned(kv_bytes / 2);
  DeviceMemory& memory = tensors_.emplace_back();
  Check(cudaMalloc(memory.out(), bytes), "allocate an input set");
  auto* base = static_cast<std::byte*>(memory.get());
  Check(FillUniform(shape.attention.dtype, seed, bytes / sizeof(uint16_t), base, stream),
        "fill an input set");
  if (shape.attention.kv_dtype == KvDType::kFloat8E4M3) {
    Check(FillUniformE4M3(~seed, bytes - key_at, base + key_at, stream), "fill FP8 K and V");
  }
  Check(cudaMemsetAsync(base + output_at, 0xff, query_bytes, stream), "poison an output");
  DeviceTensors tensors;
  tensors.query = base;
  tensors.output = base + output_at;
  tensors.key = base + key_at;
  tensors.kv_scales = static_cast<const float*>(kv_scales_.get());
  if (shape.paged) {
    tensors.pages = static_cast<const int32_t*>(device_pages_.get());
  } else {
    tensors.value = base + value_at;
  }
  spans_.push_back(MakeSpans(shape.attention, tensors));
}

}  // namespace flashcore::kernels
