// Random attention problems for the kernel tests: owns every buffer of a batch, poisons what a
// kernel must not read into a result, and finds out whether it wrote where it must not.
#ifndef FLASHCORE_TESTS_KERNELS_PROBLEM_H_
#define FLASHCORE_TESTS_KERNELS_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

enum class Layout { kDenseNhd, kDenseHnd, kPaged };

struct SpanShape {
  int32_t query_rows = 1;
  int32_t kv_rows = 64;
  Mask mask = Mask::None();
  Layout layout = Layout::kPaged;
  float magnitude = 1;        // elements are uniform in [-magnitude, magnitude], ...
  int32_t loud_kv_head = -1;  // ... but the V elements of this KV head, if any, in [-100, 100]
};

// One span with its memory. Q and O rows are padded; every element that the span does not own is
// NaN: padding of Q and O, K/V rows past kv_rows, pages of nobody, and O and LSE before the run.
// FP8 K/V are made from 16-bit elements in the same layout, with the scale of every KV head that
// just holds its largest magnitude.
class ProblemSpan {
 public:
  ProblemSpan(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random);
  ProblemSpan(const ProblemSpan&) = delete;
  ProblemSpan& operator=(const ProblemSpan&) = delete;

  const Span& span() const { return span_; }
  Span& mutable_span() { return span_; }

  // The span over K/V as they were before they became FP8: 16-bit elements.
  Span unquantised() const;

  // For tests that place special values. FP8 K/V keep their scales.
  uint16_t* QueryRow(int32_t row, int32_t head);
  void SetKey(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&key_, row, kv_head, d, value);
  }
  void SetValue(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&value_, row, kv_head, d, value);
  }
  // The largest magnitude of V of a KV head, rounded to 16 bits.
  float LargestValue(int32_t kv_head) const { return LargestOf(value_, kv_head); }

  void PoisonOutputs();
  // Whether every element outside the span's own O and LSE is as PoisonOutputs left it.
  bool PaddingIsUntouched() const;
  // Packed NHD: [query_rows, num_heads, head_dim] and [query_rows, num_heads].
  std::vector<uint16_t> Output() const;
  std::vector<float> Lse() const;

 private:
  // K or V.
  struct KvTensor {
    std::vector<uint16_t> elements;
    std::vector<uint8_t> codes;  // FP8 only: E4M3 of the same elements, ...
    std::vector<float> scales;   // ... over these: [kv_heads]
  };

  void MakeQuery(const SpanShape& shape, std::mt19937_64* random);
  void LayOutKv(const SpanShape& shape, std::mt19937_64* random);
  void FillKv(const SpanShape& shape, std::mt19937_64* random);
  void Quantise(KvTensor* tensor) const;
  void Set(KvTensor* tensor, int32_t row, int32_t kv_head, int32_t d, float value) const;
  float LargestOf(const KvTensor& tensor, int32_t kv_head) const;
  size_t KvIndex(int32_t row, int32_t kv_head) const;
  size_t OutputIndex(int32_t row, int32_t head) const;
  size_t LseIndex(int32_t row, int32_t head) const;

  const Geometry geometry_;
  Span span_;
  KvView unquantised_;
  KvTensor key_, value_;
  std::vector<uint16_t> query_, output_;
  std::vector<float> lse_;
  std::vector<int32_t> pages_;
};

// A batch of such spans. Movable, not copyable.
class Problem {
 public:
  Problem(const Geometry& geometry, const std::vector<SpanShape>& shapes, std::mt19937_64* random);

  AttentionBatch batch();
  AttentionBatch batch_of(int span);  // that span alone
  ProblemSpan& span(int index) { return *spans_[index]; }
  int num_spans() const { return static_cast<int>(spans_.size()); }
  const Geometry& geometry() const { return geometry_; }

 private:
  Geometry geometry_;
  std::vector<std::unique_ptr<ProblemSpan>> spans_;
  std::vector<Span> views_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_PROBLEM_H_
