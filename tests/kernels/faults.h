// A span's result if its kernel had a fault. On the host, from the exact result: for tests of the
// error bounds.
#ifndef FLASHCORE_TESTS_KERNELS_FAULTS_H_
#define FLASHCORE_TESTS_KERNELS_FAULTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/oracle/error_bound.h"
#include "kernels/oracle/reference.h"
#include "kernels/oracle/rows.h"

namespace flashcore::kernels {

enum class Fault {
  kZeros,         // O is 0, LSE is right
  kLostRow,       // a K/V row is skipped
  kLostValue,     // a V row counts as zeros, its probability stays in the sum
  kLostTile,      // the 64 K/V rows of a tile are skipped
  kLostEnd,       // the newest 16 K/V rows are skipped
  kMaskEdge,      // left or right of the mask is one more or one less
  kSwappedHeads,  // two query heads are exchanged
  kSwappedRows,   // two query rows are exchanged
  kWrongKvHead,   // KV heads in reverse order
  // For kernels that round Q, or P to 8 bits:
  kQueryScale,   // a row of Q has the scale of another
  kQueryBits,    // codes of Q without their lowest bit, those of 16 bits without their lower half
  kProbability,  // P has 7 bits
  kCount,
};
const char* Name(Fault fault);

// A span whose kernel has faults. A K/V row that is lost, or that a wrong mask edge gains, is one
// that matters: for some query row it has at least half the average weight and 1/20 of the largest
// weight (for kLostValue 1/4). Without other rows, nothing is lost.
class FaultySpan {
 public:
  // `exact` is the result of `span` with Q as `rounding` says, and lives longer than this.
  FaultySpan(const Geometry& geometry, const Span& span, const Rounding& rounding,
             const AttentionResult& exact);

  // The result with a fault at a random place; none if the span cannot show the fault (it has one
  // head, no window, ...).
  std::optional<AttentionResult> With(Fault fault, std::mt19937_64* random) const;

 private:
  KvRange Visible(int32_t row) const;
  RowAttention<double> Attend(int32_t row, int32_t head, std::vector<double> query) const;
  // The probabilities of a query row and head, of the K/V rows visible to it.
  std::vector<double> Weights(int32_t row, int32_t head) const;
  double Score(const std::vector<double>& query, int32_t head, int32_t kv_row) const;
  // Returns the sum of the weights of K/V rows, relative to e^base; adds the weighted V rows.
  double Sum(const std::vector<double>& query, int32_t head, KvRange kv_rows, double base,
             std::vector<double>* weighted) const;

  // A K/V row that matters to a random query row; -1 if no query row sees one.
  int32_t WeightyRow(double of_largest, std::mt19937_64* random) const;
  // Whether the results differ by a K/V row that matters.
  bool DiffersByAWeightyRow(const AttentionResult& changed) const;

  std::optional<AttentionResult> WithWrongEdge(std::mt19937_64* random) const;
  std::optional<AttentionResult> WithWrongKvHead() const;
  std::optional<AttentionResult> WithoutEnd(std::mt19937_64* random) const;
  // Without the K/V rows `lost`; or, if `only_values`, with zeros for V there.
  AttentionResult Without(KvRange lost, bool only_values) const;
  void Remove(int32_t row, int32_t head, KvRange lost, KvRange visible, bool only_values,
              AttentionResult* result) const;
  std::optional<AttentionResult> WithQueryScale(std::mt19937_64* random) const;
  std::optional<AttentionResult> WithQueryBits(std::mt19937_64* random) const;
  std::optional<AttentionResult> WithProbabilityBits() const;
  // Rounds one row. Returns whether that is visible beside what 8 bits and the output round.
  bool RoundProbabilities(int32_t row, int32_t head, AttentionResult* result) const;
  // With another Q in one row; none if that changes the LSE by less than rounding may.
  std::optional<AttentionResult> WithQuery(int32_t row, int32_t head,
                                           const std::vector<double>& query) const;
  // None if the two have about the same O.
  std::optional<AttentionResult> Swapped(int32_t row, int32_t head, int32_t other_row,
                                         int32_t other_head) const;

  size_t Index(int32_t row, int32_t head) const { return size_t{1} * row * g_.num_heads + head; }
  const DecodedKv& Kv(int32_t head) const { return kv_[head / g_.group()]; }
  std::vector<double> Query(int32_t row, int32_t head) const {
    return DecodedQuery(g_, span_, row, head, rounding_.query_codes);
  }

  const Geometry g_;
  const Span span_;
  const Rounding rounding_;
  const AttentionResult& exact_;
  std::vector<DecodedKv> kv_;  // [kv_heads]
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_FAULTS_H_
