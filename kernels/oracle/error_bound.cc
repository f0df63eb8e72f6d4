#include "kernels/oracle/error_bound.h"

#include <algorithm>
#include <cmath>

#include "kernels/oracle/errors.h"

namespace flashcore::kernels {
namespace {

constexpr double kFloat32 = 0x1p-24;
constexpr double kElementDeviations = 4;
constexpr double kRowDeviations = 1.5;
constexpr double kRowVarianceDeviations = 7;

// The bounds of one query row of one head that sees any K/V row.
class RowModel {
 public:
  // `summed_rows`: K/V rows that go into one running sum.
  RowModel(const Rounding& rounding, const QueryRow& row, int32_t summed_rows)
      : rounding_(rounding),
        row_(row),
        kv_(row.kv),
        summed_rows_(summed_rows),
        exact_(AttendExactly(row)),
        largest_weight_(std::exp(exact_.largest_score - exact_.lse)) {
    SetScoreErrors();
    SumValues();
  }

  // Writes exact result and bounds to place `at` of [query_rows, num_heads].
  void Write(size_t at, Expected* expected) const {
    expected->exact.lse[at] = exact_.lse;
    expected->lse_bound[at] = LseBound();
    const size_t head_dim = kv_.head_dim();
    std::copy(exact_.output.begin(), exact_.output.end(),
              expected->exact.output.begin() + at * head_dim);
    expected->row_bound[at] = BoundOutput(expected->element_bound.data() + at * head_dim);
  }

 private:
  void SetScoreErrors() {
    const double steps = 1.0 * kv_.head_dim() / rounding_.step;
    const double scale = row_.terms.softmax_scale;
    for (int32_t j = row_.visible.begin; j < row_.visible.end; ++j) {
      const float* const key = kv_.Key(j);
      double squares = 0;
      for (int32_t d = 0; d < kv_.head_dim(); ++d) {
        const double product = row_.elements[d] * key[d];
        squares += product * product;
      }
      const double score = exact_.scores[j - row_.visible.begin];
      score_errors_.push_back(rounding_.sums *
                                  std::sqrt(steps * (scale * scale * squares + score * score)) +
                              2 * kFloat32 * (std::abs(score) + std::abs(exact_.largest_score)));
    }
  }

  double LseBound() const {
    double squares = 0;
    for (size_t n = 0; n < score_errors_.size(); ++n) {
      const double error = exact_.weights[n] * score_errors_[n];
      squares += error * error;
    }
    // The sum of the probabilities in 8 lanes or more, then over splits; the logarithm.
    const double adds = summed_rows_ / 8.0 + 1.0 * score_errors_.size() / summed_rows_;
    return kElementDeviations * (std::sqrt(squares) + 2 * kFloat32 * std::sqrt(adds)) +
           6 * kFloat32 * (1 + std::abs(exact_.lse) + std::abs(exact_.largest_score));
  }

  void SumValues() {
    const int32_t head_dim = kv_.head_dim();
    value_squares_.assign(head_dim, 0);
    changes_ = change_squares_ = code_squares_ = value_squares_;
    double* const value_squares = value_squares_.data();
    double* const changes = changes_.data();
    double* const change_squares = change_squares_.data();
    double tile_error = 0;
    for (int32_t j = row_.visible.begin; j < row_.visible.end; ++j) {
      const double p = Weight(j), score_error = score_errors_[j - row_.visible.begin];
      const double floor = rounding_.smallest * largest_weight_;
      const double unit = rounding_.probability;
      const double change = p * p * (unit * unit + score_error * score_error) +
                            floor * floor;  // square of the error of p
      change_sum_ += change;
      const float* value = kv_.Value(j);
      if (j == row_.visible.begin || j % kPageTokens == 0) tile_error = TileError(j);
      if (tile_error > 0 && kv_.ValueScale(j) > 0) {
        AddCodeErrors(tile_error / kv_.ValueScale(j), value);
      }
      for (int32_t d = 0; d < head_dim; ++d) {
        const double v = value[d];
        value_squares[d] += p * p * v * v;
        changes[d] += change * v;
        change_squares[d] += change * v * v;
      }
    }
  }

  // `error`: the largest of a probability of 8 bits, whose V row is `value`.
  void AddCodeErrors(double error, const float* value) {
    double sum = 0;
    for (int32_t d = 0; d < kv_.head_dim(); ++d) {
      const double square = error * error * value[d] * value[d];
      code_squares_[d] += square;
      sum += square;
    }
    code_fourths_ += sum * sum;
  }

  // The largest error of a probability times the scale of its V row, of the K/V tile from j on.
  double TileError(int32_t j) const {
    if (rounding_.tile_weight == 0) return 0;
    const int32_t end = std::min(row_.visible.end, (j / kPageTokens + 1) * kPageTokens);
    double largest = 0;
    for (int32_t n = j; n < end; ++n) largest = std::max(largest, Weight(n) * kv_.ValueScale(n));
    return rounding_.tile_weight * largest;
  }

  // Bound of the sum over head_dim of the squares of what 8-bit P adds to O, and `codes` that of
  // the squares of its largest errors. With random V it is a sum of about head_dim random squares,
  // of errors that are uniform.
  double CodeSquares(double codes) const {
    if (codes == 0) return 0;
    const double variance = 2.0 / kv_.head_dim() + 0.8 * code_fourths_ / (codes * codes);
    return codes / 3 * (1 + kRowVarianceDeviations * std::sqrt(variance));
  }

  // Writes the bounds of the elements to element_bound[head_dim]. Returns that of the row.
  double BoundOutput(double* element_bound) const {
    const double steps = 1.0 * summed_rows_ / rounding_.step + 8;  // and rescales
    const double floor = rounding_.smallest * largest_weight_;     // of a sum in float16
    double output_squares = 0, squares = 0, codes = 0;
    for (int32_t d = 0; d < kv_.head_dim(); ++d) {
      const double o = exact_.output[d];
      const double by_weights =
          rounding_.cancels
              ? std::max(0.0, change_squares_[d] - 2 * o * changes_[d] + o * o * change_sum_)
              : change_squares_[d];
      const double partial = value_squares_[d] / 2 + o * o;
      const double by_sums = steps * (rounding_.sums * rounding_.sums * partial + floor * floor);
      // Tensor cores truncate float32 sums: these errors have one sign.
      const double truncation = 2 * kFloat32 * summed_rows_ / 8 * std::sqrt(partial);
      const double square = by_weights + by_sums + truncation * truncation;
      element_bound[d] = rounding_.output * std::abs(o) + 0x1p-25 +
                         kElementDeviations * std::sqrt(square + code_squares_[d]);
      output_squares += o * o;
      squares += square;
      codes += code_squares_[d];
    }
    return 0x1p-25 + std::sqrt((rounding_.output * rounding_.output * output_squares +
                                kRowDeviations * kRowDeviations * squares + CodeSquares(codes)) /
                               kv_.head_dim());
  }

  double Weight(int32_t j) const { return exact_.weights[j - row_.visible.begin]; }

  const Rounding& rounding_;
  const QueryRow& row_;
  const DecodedKv& kv_;
  const int32_t summed_rows_;
  const RowAttention<double> exact_;
  const double largest_weight_;
  std::vector<double> score_errors_;  // [visible rows], absolute
  // Over tokens, with w the square of the error of p: sums of p^2 v^2, w v, w v^2, and w.
  std::vector<double> value_squares_, changes_, change_squares_;
  double change_sum_ = 0;
  // Over tokens, of the largest errors of O by 8-bit P: squares, and squares of their sums over
  // head_dim.
  std::vector<double> code_squares_;
  double code_fourths_ = 0;
};

// 0 / 0 counts as 0.
double Ratio(double error, double bound) { return error == 0 ? 0 : error / bound; }

}  // namespace

Expected ExpectedOf(const Geometry& geometry, const Span& span, const Rounding& rounding) {
  const KvRange all = Union(VisibleRows(span, VisibleByMask));
  const int32_t summed = std::min(std::max(1, all.end - all.begin), rounding.split_rows);
  const size_t rows = size_t{1} * span.query_rows * geometry.num_heads;
  const size_t elements = rows * geometry.head_dim;
  // The result of a row that sees nothing is exact.
  const std::vector<double> row_zeros(rows, 0), zeros(elements, 0);
  Expected expected{{zeros, std::vector<double>(rows, kNothing)}, zeros, row_zeros, row_zeros};
  ForEachQueryRow(geometry, span, VisibleByMask, rounding.query_codes, [&](const QueryRow& row) {
    if (row.visible.begin == row.visible.end) return;
    RowModel(rounding, row, summed).Write(row.Index(geometry), &expected);
  });
  return expected;
}

ErrorRatios CompareResults(const AttentionResult& got, const AttentionResult& exact,
                           const Expected& want) {
  ErrorRatios ratios;
  const size_t head_dim = got.lse.empty() ? 1 : got.output.size() / got.lse.size();
  for (size_t row = 0; row < got.lse.size(); ++row) {
    double squares = 0;
    for (size_t n = row * head_dim; n < (row + 1) * head_dim; ++n) {
      const double error = Difference(got.output[n], exact.output[n]);
      squares += error * error;
      ratios.element = std::max(ratios.element, Ratio(error, want.element_bound[n]));
    }
    ratios.row = std::max(ratios.row, Ratio(std::sqrt(squares / head_dim), want.row_bound[row]));
    ratios.lse =
        std::max(ratios.lse, Ratio(Difference(got.lse[row], exact.lse[row]), want.lse_bound[row]));
  }
  return ratios;
}

}  // namespace flashcore::kernels
