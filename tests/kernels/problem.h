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
  float magnitude = 1;       // elements are uniform in [-magnitude, magnitude]
  bool uneven_rows = false;  // K/V rows are up to twice as large, or up to half as large
};

// One span with its memory. Q and O rows are padded. Every element that the span does not own is
// NaN: padding of Q and O, K/V rows from kv_rows on, unused pages, and O and LSE before the run.
// 8-bit K/V are made from 16-bit elements, and are paged whatever the shape says. Over INT8 K/V,
// codes of Q are certain (kernels/oracle/rows.h).
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

  // For tests that place special values. 8-bit rows are quantised again.
  uint16_t* QueryRow(int32_t row, int32_t head);
  void SetKey(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&key_, row, kv_head, d, value);
  }
  void SetValue(int32_t row, int32_t kv_head, int32_t d, float value) {
    Set(&value_, row, kv_head, d, value);
  }
  // Sets every K/V element that the span does not own: rows from kv_rows on and unused pages.
  void FillBeyondEnd(float value);

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
    std::vector<std::byte> pages;  // 8-bit K/V only
  };

  void MakeQuery(const SpanShape& shape, std::mt19937_64* random);
  void LayOutKv(const SpanShape& shape, std::mt19937_64* random);
  void FillKv(const SpanShape& shape, std::mt19937_64* random);
  void Make8Bit(KvTensor* tensor) const;
  // Stores a row as 8 bits. `row` counts the rows of all pages, used or not.
  void Store8Bit(KvTensor* tensor, int64_t row, int32_t kv_head) const;
  void Set(KvTensor* tensor, int32_t row, int32_t kv_head, int32_t d, float value) const;
  int64_t PagedRow(int32_t row) const;  // the place of a row of the span among them
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
