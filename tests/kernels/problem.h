// Random attention problems for the kernel tests. Owns every buffer of a batch, poisons what must
// not reach a result, and detects writes outside the outputs.
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
  float magnitude = 1;        // elements are uniform in [-magnitude, magnitude]
  bool uneven_rows = false;   // K/V rows are up to twice as large, or up to half as large
  int32_t loud_kv_head = -1;  // V elements of this KV head are uniform in [-100, 100]; -1: none
};

// One span with its memory. Q and O rows are padded. Every element that the span does not own is
// NaN: padding of Q and O, K/V rows from kv_rows on, unused pages, and O and LSE before the run.
// FP8 K/V are made from 16-bit elements in the same layout; the scale of a KV head maps its largest
// magnitude to the largest E4M3. INT8 K/V are made from them too, and are paged whatever the shape
// says.
class ProblemSpan {
 public:
  ProblemSpan(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random);
  ProblemSpan(const ProblemSpan&) = delete;
  ProblemSpan& operator=(const ProblemSpan&) = delete;

  const Geometry& geometry() const { return geometry_; }
  const Span& span() const { return span_; }
  Span& mutable_span() { return span_; }

  // The span over the 16-bit K/V that the 8-bit K/V were made from.
  Span unquantised() const;

  // For tests that place special values. FP8 K/V keep their scales; INT8 rows are quantised again.
  uint16_t* QueryRow(int32_t row, int32_t head);
  void SetKey(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&key_, row, kv_head, d, value);
  }
  void SetValue(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&value_, row, kv_head, d, value);
  }
  // Sets every K/V element that the span does not own: rows from kv_rows on and unused pages.
  void FillBeyondEnd(float value);
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
    // FP8: the same elements divided by `scales`, as E4M3. INT8: the pages.
    std::vector<uint8_t> codes;
    std::vector<float> scales;  // FP8 only: [kv_heads]
  };

  void MakeQuery(const SpanShape& shape, std::mt19937_64* random);
  void LayOutKv(const SpanShape& shape, std::mt19937_64* random);
  void FillKv(const SpanShape& shape, std::mt19937_64* random);
  void MakeFp8(KvTensor* tensor) const;
  void MakeInt8(KvTensor* tensor) const;
  void QuantiseRow(KvTensor* tensor, int64_t page, int32_t row, int32_t kv_head) const;
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

// A batch of ProblemSpans. Movable, not copyable.
class Problem {
 public:
  // O and LSE of all spans: [spans].
  struct Outputs {
    std::vector<std::vector<uint16_t>> output;
    std::vector<std::vector<float>> lse;
  };

  Problem(const Geometry& geometry, const std::vector<SpanShape>& shapes, std::mt19937_64* random);

  AttentionBatch batch();
  AttentionBatch batch_of(int span);  // that span alone
  ProblemSpan& span(int index) { return *spans_[index]; }
  int num_spans() const { return static_cast<int>(spans_.size()); }
  const Geometry& geometry() const { return geometry_; }

  void PoisonOutputs();
  Outputs outputs() const;

 private:
  Geometry geometry_;
  std::vector<std::unique_ptr<ProblemSpan>> spans_;
  std::vector<Span> views_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_PROBLEM_H_
