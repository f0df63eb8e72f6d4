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
  float magnitude = 1;  // elements are uniform in [-magnitude, magnitude]
};

// One span with its memory. Q and O rows are padded; every element that the span does not own is
// NaN: padding of Q and O, K/V rows past kv_rows, pages of nobody, and O and LSE before the run.
class ProblemSpan {
 public:
  ProblemSpan(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random);
  ProblemSpan(const ProblemSpan&) = delete;
  ProblemSpan& operator=(const ProblemSpan&) = delete;

  const Span& span() const { return span_; }
  Span& mutable_span() { return span_; }

  // Elements of the inputs, for tests that place special values.
  uint16_t* QueryRow(int32_t row, int32_t head);
  uint16_t* KeyRow(int32_t row, int32_t kv_head) { return KvRow(&key_, row, kv_head); }
  uint16_t* ValueRow(int32_t row, int32_t kv_head) { return KvRow(&value_, row, kv_head); }

  void PoisonOutputs();
  // Whether every element outside the span's own O and LSE is as PoisonOutputs left it.
  bool PaddingIsUntouched() const;
  // Packed NHD: [query_rows, num_heads, head_dim] and [query_rows, num_heads].
  std::vector<uint16_t> Output() const;
  std::vector<float> Lse() const;

 private:
  void MakeQuery(const SpanShape& shape, std::mt19937_64* random);
  void MakeKv(const SpanShape& shape, std::mt19937_64* random);
  uint16_t* KvRow(std::vector<uint16_t>* elements, int32_t row, int32_t kv_head);
  size_t OutputIndex(int32_t row, int32_t head) const;
  size_t LseIndex(int32_t row, int32_t head) const;

  const Geometry geometry_;
  Span span_;
  std::vector<uint16_t> query_, output_, key_, value_;
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
