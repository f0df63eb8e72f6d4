#include "tests/kernels/error_bound.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "tests/kernels/query_codes.h"

namespace flashcore::kernels {
namespace {

constexpr double kFloat32 = 0x1p-24;
constexpr double kElementDeviations = 4;
constexpr double kRowDeviations = 1.5;
constexpr double kRowVarianceDeviations = 7;
constexpr double kNothing = -std::numeric_limits<double>::infinity();

float Load(DType dtype, const std::byte* row, int32_t d) {
  uint16_t element;
  std::memcpy(&element, row + d * sizeof(element), sizeof(element));
  return ToFloat(dtype, element);
}

// A visible token of a query row.
struct Token {
  double score = 0;
  double score_error = 0;  // absolute
  double weight = 0;       // probability
};

// One query row of one head.
class RowModel {
 public:
  RowModel(const Rounding& rounding, const DecodedKv& kv, int32_t summed_rows)
      : rounding_(rounding), kv_(kv), summed_rows_(summed_rows) {}

  // Appends the row to `*expected`.
  void Add(const std::vector<double>& query, const Terms& terms, KvRange visible,
           Expected* expected) {
    SetScores(query, terms, visible);
    if (tokens_.empty()) {
      AddNothing(expected);
      return;
    }
    const double lse = SetWeights();
    expected->exact.lse.push_back(lse);
    expected->lse_bound.push_back(LseBound(lse));
    SumValues(visible);
    AddOutput(expected);
  }

 private:
  void SetScores(const std::vector<double>& query, const Terms& terms, KvRange visible) {
    tokens_.resize(visible.end - visible.begin);
    const double steps = 1.0 * kv_.head_dim() / rounding_.step;
    max_ = kNothing;
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      const float* key = kv_.Key(j);
      double dot = 0, squares = 0;
      for (int32_t d = 0; d < kv_.head_dim(); ++d) {
        const double product = query[d] * key[d];
        dot += product;
        squares += product * product;
      }
      Token& token = tokens_[j - visible.begin];
      token.score = terms.Score(dot);
      token.score_error =
          std::abs(terms.softmax_scale) * rounding_.sums * std::sqrt(steps * (squares + dot * dot));
      max_ = std::max(max_, token.score);
    }
  }

  // Returns the LSE.
  double SetWeights() {
    double sum = 0;
    for (Token& token : tokens_) sum += token.weight = std::exp(token.score - max_);
    for (Token& token : tokens_) {
      token.weight /= sum;
      token.score_error += 2 * kFloat32 * (std::abs(token.score) + std::abs(max_));
    }
    largest_weight_ = 1 / sum;
    return max_ + std::log(sum);
  }

  double LseBound(double lse) const {
    double squares = 0;
    for (const Token& token : tokens_) {
      const double error = token.weight * token.score_error;
      squares += error * error;
    }
    // The sum of the probabilities in 8 lanes or more, then over splits; the logarithm.
    const double adds = summed_rows_ / 8.0 + 1.0 * tokens_.size() / summed_rows_;
    return kElementDeviations * (std::sqrt(squares) + 2 * kFloat32 * std::sqrt(adds)) +
           6 * kFloat32 * (1 + std::abs(lse) + std::abs(max_));
  }

  void SumValues(KvRange visible) {
    const int32_t head_dim = kv_.head_dim();
    output_.assign(head_dim, 0);
    value_squares_ = changes_ = change_squares_ = code_squares_ = output_;
    double* const output = output_.data();
    double* const value_squares = value_squares_.data();
    double* const changes = changes_.data();
    double* const change_squares = change_squares_.data();
    change_sum_ = code_fourths_ = 0;
    double tile_error = 0;
    for (int32_t j = visible.begin; j < visible.end; ++j) {
      const Token& token = tokens_[j - visible.begin];
      const double p = token.weight;
      const double floor = rounding_.smallest * largest_weight_;
      const double unit = rounding_.probability;
      const double change = p * p * (unit * unit + token.score_error * token.score_error) +
                            floor * floor;  // square of the error of p
      change_sum_ += change;
      const float* value = kv_.Value(j);
      if (j == visible.begin || j % kPageTokens == 0) tile_error = TileError(j, visible);
      if (tile_error > 0 && kv_.ValueScale(j) > 0) {
        AddCodeErrors(tile_error / kv_.ValueScale(j), value);
      }
      for (int32_t d = 0; d < head_dim; ++d) {
        const double v = value[d];
        output[d] += p * v;
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
  double TileError(int32_t j, KvRange visible) const {
    if (rounding_.tile_weight == 0) return 0;
    const int32_t end = std::min(visible.end, (j / kPageTokens + 1) * kPageTokens);
    double largest = 0;
    for (int32_t n = j; n < end; ++n) {
      largest = std::max(largest, tokens_[n - visible.begin].weight * kv_.ValueScale(n));
    }
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

  void AddOutput(Expected* expected) const {
    const double steps = 1.0 * summed_rows_ / rounding_.step + 8;  // and rescales
    const double floor = rounding_.smallest * largest_weight_;     // of a sum in float16
    double output_squares = 0, squares = 0, codes = 0;
    for (int32_t d = 0; d < kv_.head_dim(); ++d) {
      const double o = output_[d];
      const double by_weights =
          rounding_.cancels
              ? std::max(0.0, change_squares_[d] - 2 * o * changes_[d] + o * o * change_sum_)
              : change_squares_[d];
      const double partial = value_squares_[d] / 2 + o * o;
      const double by_sums = steps * (rounding_.sums * rounding_.sums * partial + floor * floor);
      // Tensor cores truncate float32 sums: these errors have one sign.
      const double truncation = 2 * kFloat32 * summed_rows_ / 8 * std::sqrt(partial);
      const double square = by_weights + by_sums + truncation * truncation;
      expected->exact.output.push_back(o);
      expected->element_bound.push_back(rounding_.output * std::abs(o) + 0x1p-25 +
                                        kElementDeviations * std::sqrt(square + code_squares_[d]));
      output_squares += o * o;
      squares += square;
      codes += code_squares_[d];
    }
    expected->row_bound.push_back(
        0x1p-25 + std::sqrt((rounding_.output * rounding_.output * output_squares +
                             kRowDeviations * kRowDeviations * squares + CodeSquares(codes)) /
                            kv_.head_dim()));
  }

  // A row that sees nothing: its result is exact.
  void AddNothing(Expected* expected) const {
    const size_t size = expected->exact.output.size() + kv_.head_dim();
    expected->exact.output.resize(size, 0);
    expected->element_bound.resize(size, 0);
    expected->row_bound.push_back(0);
    expected->exact.lse.push_back(kNothing);
    expected->lse_bound.push_back(0);
  }

  const Rounding& rounding_;
  const DecodedKv& kv_;
  const int32_t summed_rows_;  // K/V rows that go into one running sum
  std::vector<Token> tokens_;
  double max_ = 0;
  double largest_weight_ = 0;
  // Over tokens, with w the square of the error of p: sums of p v, p^2 v^2, w v, w v^2, and w.
  std::vector<double> output_, value_squares_, changes_, change_squares_;
  double change_sum_ = 0;
  // Over tokens, of the largest errors of O by 8-bit P: squares, and squares of their sums over
  // head_dim.
  std::vector<double> code_squares_;
  double code_fourths_ = 0;
};

// Moves what was appended for KV head `kv_head`, [rows, group, size], to its place in
// [rows, num_heads, size].
void Place(const std::vector<double>& from, const Geometry& g, int32_t rows, int32_t kv_head,
           int32_t size, std::vector<double>* to) {
  to->resize(size_t{1} * rows * g.num_heads * size);
  const int64_t count = int64_t{g.group()} * size;
  for (int32_t i = 0; i < rows; ++i) {
    std::copy_n(from.begin() + i * count, count,
                to->begin() + (int64_t{i} * g.num_kv_heads + kv_head) * count);
  }
}

double UnitOf(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8; }

double Ratio(double error, double bound) {
  if (error == 0) return 0;
  return std::isfinite(error) ? error / bound : std::numeric_limits<double>::infinity();
}

double Difference(double got, double want) { return got == want ? 0 : std::abs(got - want); }

}  // namespace

DecodedKv::DecodedKv(const Geometry& geometry, const KvView& kv, int32_t kv_head, KvRange rows)
    : begin_(rows.begin), head_dim_(geometry.head_dim) {
  key_.resize(size_t{1} * (rows.end - rows.begin) * head_dim_);
  value_.resize(key_.size());
  for (int32_t j = rows.begin; j < rows.end; ++j) {
    const int32_t tile = j / kPageTokens;
    const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
    const int64_t offset =
        page * kv.page_stride + kv_head * kv.head_stride + j % kPageTokens * kv.row_stride;
    const size_t to = size_t{1} * (j - begin_) * head_dim_;
    const auto decode = [&](const std::byte* tensor, float* elements) {
      const bool has_scale = Is8Bit(geometry.kv_dtype);
      const float scale = has_scale ? RowScale(kv, tensor, kv_head, j) : 1;
      for (int32_t d = 0; d < head_dim_; ++d) {
        elements[d] = has_scale ? scale * CodeToFloat(geometry.kv_dtype, tensor[offset + d])
                                : Load(geometry.dtype, tensor + offset, d);
      }
      return scale;
    };
    decode(kv.key, key_.data() + to);
    value_scale_.push_back(decode(kv.value, value_.data() + to));
  }
}

std::vector<double> DecodedQuery(const Geometry& geometry, const Span& span, int32_t row,
                                 int32_t head, int32_t query_codes) {
  const std::byte* from = span.query + row * span.row_stride + head * span.head_stride;
  std::vector<double> query(geometry.head_dim);
  for (int32_t d = 0; d < geometry.head_dim; ++d) query[d] = Load(geometry.dtype, from, d);
  if (query_codes > 0)
    RoundQuery(
        query_codes, [](double code) { return code; }, &query);
  return query;
}

Rounding Rounding::Of(KernelSpec spec, const PlanOptions& options, const Geometry& geometry,
                      int32_t query_rows) {
  spec.precision = PrecisionFor(geometry, query_rows);
  Rounding rounding;
  rounding.output = UnitOf(spec.dtype);
  rounding.probability = 4 * kFloat32;  // the exponential
  rounding.sums = 2 * kFloat32;
  if (spec.arch != Arch::kCpu && spec.precision != Precision::kInt8QkPv) {
    const DType dtype = spec.kv_dtype == KvDType::kInt8 ? DType::kFloat16 : spec.dtype;
    rounding.probability_dtype = dtype;
    rounding.probability += UnitOf(dtype);
    if (dtype == DType::kFloat16) rounding.smallest = 0x1p-25;
  }
  if (Is8Bit(spec.kv_dtype)) {
    rounding.probability += kFloat32;  // times V's scale
    rounding.cancels = spec.arch == Arch::kCpu;
  }
  if (spec.kv_dtype == KvDType::kInt8 && spec.arch != Arch::kCpu) {
    rounding.query_codes = LargestQueryCode(spec.precision);
  }
  if (spec.precision == Precision::kInt8QkPv) {
    rounding.tile_weight = 0.5 / 255;
  }
  if (spec.accumulate == Accumulate::kFloat16) {
    rounding.sums = 0x1p-11;
    rounding.step = 8;
  }
  rounding.plan = options;
  return rounding;
}

Expected ExpectedOf(const Geometry& geometry, const Span& span, const Rounding& rounding) {
  const Geometry& g = geometry;
  const int32_t rows = span.query_rows;
  const KvRange all = VisibleKv(span.terms.mask, rows, span.kv.rows, 0, rows);
  const int32_t visible_rows = std::max(1, all.end - all.begin);
  const int32_t summed = std::min(visible_rows, SplitRows(g, span, rounding.plan, kManyWorkers));
  Expected expected;
  for (int32_t kv_head = 0; kv_head < g.num_kv_heads; ++kv_head) {
    const DecodedKv kv(g, span.kv, kv_head, all);
    RowModel model(rounding, kv, summed);
    Expected part;
    for (int32_t i = 0; i < rows; ++i) {
      const KvRange visible = VisibleKv(span.terms.mask, rows, span.kv.rows, i, i + 1);
      for (int32_t h = kv_head * g.group(); h < (kv_head + 1) * g.group(); ++h) {
        model.Add(DecodedQuery(g, span, i, h, rounding.query_codes), span.terms, visible, &part);
      }
    }
    Place(part.exact.output, g, rows, kv_head, g.head_dim, &expected.exact.output);
    Place(part.element_bound, g, rows, kv_head, g.head_dim, &expected.element_bound);
    Place(part.exact.lse, g, rows, kv_head, 1, &expected.exact.lse);
    Place(part.row_bound, g, rows, kv_head, 1, &expected.row_bound);
    Place(part.lse_bound, g, rows, kv_head, 1, &expected.lse_bound);
  }
  return expected;
}

ErrorRatios CompareResults(const SpanResult& got, const SpanResult& exact, const Expected& want) {
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
