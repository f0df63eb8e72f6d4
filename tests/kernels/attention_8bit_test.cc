// The error of 8-bit K/V, and of products of codes, against float64 attention over the unquantised
// K/V: with a perfect kernel, and with every kernel of the registry that reads it.
// attention_test.cc compares kernels with attention over the stored rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/oracle/error_bound.h"
#include "kernels/oracle/reference.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/kernel_rounding.h"
#include "tests/kernels/launch.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {
namespace {

constexpr int32_t kHeads = 4;
constexpr int32_t kKvHeads = 2;

SpanShape UnevenSpan(int32_t query_rows, int32_t kv_rows) {
  SpanShape shape{query_rows, kv_rows};
  shape.uneven_rows = true;
  return shape;
}

// K or V of one KV head: rows, and the scales of the stored ones.
struct Rows {
  std::vector<std::vector<double>> exact;   // [rows][head_dim]
  std::vector<std::vector<double>> stored;  // scale * code
  std::vector<double> scales;               // [rows]
  // [rows][head_dim]: from the code of the element to the next.
  std::vector<std::vector<double>> steps;

  void Add(KvDType kv_dtype, int32_t head_dim, const float* exact_row, const float* stored_row,
           double scale) {
    exact.emplace_back(exact_row, exact_row + head_dim);
    stored.emplace_back(stored_row, stored_row + head_dim);
    scales.push_back(scale);
    std::vector<double>& row = steps.emplace_back(head_dim, scale);
    if (kv_dtype == KvDType::kInt8) return;
    for (int32_t d = 0; d < head_dim; ++d) {  // of E4M3: 2^-3 of a power of 2, from 2^-6 on
      row[d] *=
          std::max(0x1p-9, std::exp2(std::floor(std::log2(std::abs(exact_row[d]) / scale)) - 3));
    }
  }

  // The stored rows, each with the scale of the next.
  std::vector<std::vector<double>> WithScalesOfNeighbours() const {
    std::vector<std::vector<double>> wrong = stored;
    for (size_t j = 0; j < wrong.size(); ++j) {
      const double scale = scales[(j + 1) % scales.size()] / scales[j];
      for (double& element : wrong[j]) element *= scale;
    }
    return wrong;
  }
};

struct KvRows {
  KvRows(const ProblemSpan& problem, int32_t kv_head) {
    const Geometry& stored = problem.geometry();
    Geometry exact = stored;
    exact.kv_dtype = KvDType::kSameAsQuery;
    const KvView& kv = problem.span().kv;
    const KvRange all{0, kv.rows};
    const DecodedKv stored_rows(stored, kv, kv_head, all);
    const DecodedKv exact_rows(exact, problem.unquantised().kv, kv_head, all);
    for (int32_t j = 0; j < kv.rows; ++j) {
      key.Add(stored.kv_dtype, stored.head_dim, exact_rows.Key(j), stored_rows.Key(j),
              RowScale(kv, kv.key, kv_head, j));
      value.Add(stored.kv_dtype, stored.head_dim, exact_rows.Value(j), stored_rows.Value(j),
                RowScale(kv, kv.value, kv_head, j));
    }
  }
  Rows key, value;
};

std::vector<double> Weights(const std::vector<double>& query, double scale,
                            const std::vector<std::vector<double>>& key) {
  std::vector<double> weights;
  double sum = 0;
  for (const std::vector<double>& row : key) {
    double dot = 0;
    for (size_t d = 0; d < row.size(); ++d) dot += query[d] * row[d];
    weights.push_back(std::exp(dot * scale));
    sum += weights.back();
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

std::vector<double> Sum(const std::vector<double>& weights,
                        const std::vector<std::vector<double>>& value) {
  std::vector<double> output(value[0].size(), 0);
  for (size_t j = 0; j < value.size(); ++j) {
    for (size_t d = 0; d < output.size(); ++d) output[d] += weights[j] * value[j][d];
  }
  return output;
}

// For each K/V row, the largest product of a probability and a scale of V in its tile.
std::vector<double> LargestOfTiles(const std::vector<double>& weights,
                                   const std::vector<double>& scales) {
  std::vector<double> largest(weights.size(), 0);
  for (size_t begin = 0; begin < weights.size(); begin += kPageTokens) {
    const size_t end = std::min(weights.size(), begin + kPageTokens);
    double tile = 0;
    for (size_t j = begin; j < end; ++j) tile = std::max(tile, weights[j] * scales[j]);
    std::fill(largest.begin() + begin, largest.begin() + end, tile);
  }
  return largest;
}

// P of codes up to `largest_code`.
std::vector<double> RoundWeights(double largest_code, const Rows& value,
                                 std::vector<double> weights) {
  const std::vector<double> largest = LargestOfTiles(weights, value.scales);
  for (size_t j = 0; j < weights.size(); ++j) {
    const double step = largest[j] / largest_code / value.scales[j];
    weights[j] = step * std::nearbyint(weights[j] / step);
  }
  return weights;
}

// An error divided by its standard deviation. Each element of a stored row is off by a number that
// is uniform in half a step and independent of the others. So with p the probabilities and a the
// softmax scale, O[c] = sum p v[c] is off by p * (v[c] - O[c]) * a * q . (error of k), summed over
// the rows, and p * (error of v[c]), and by its own rounding. Codes of Q add
// p * (v[c] - O[c]) * a * (error of q) . k, those of P (error of p) * v[c].
class Deviations {
 public:
  explicit Deviations(Precision precision) : precision_(precision) {}

  void Add(const std::vector<double>& query, double scale, const KvRows& rows, double unit_roundoff,
           const std::vector<double>& got) {
    const bool rounds_query = precision_ != Precision::k16Bit;
    const double query_step =
        rounds_query ? LargestMagnitude(query) / LargestQueryCode(precision_) : 0;
    const std::vector<double> p = Weights(query, scale, rows.key.exact);
    const std::vector<double> exact = Sum(p, rows.value.exact);
    std::vector<double> score_squares(p.size(), 0);  // of the errors of scores, times 12
    for (size_t j = 0; j < p.size(); ++j) {
      for (size_t d = 0; d < query.size(); ++d) {
        score_squares[j] += std::pow(scale * query[d] * rows.key.steps[j][d], 2) +
                            std::pow(scale * query_step * rows.key.exact[j][d], 2);
      }
    }
    std::vector<double> steps(p.size(), 0);  // of P
    if (precision_ == Precision::kInt8QkPv) {
      steps = LargestOfTiles(p, rows.value.scales);
      for (size_t j = 0; j < p.size(); ++j) steps[j] /= 255 * rows.value.scales[j];
    }
    for (size_t c = 0; c < exact.size(); ++c) {
      double variance = std::pow(unit_roundoff * exact[c], 2) / 3;
      for (size_t j = 0; j < p.size(); ++j) {
        const double by_key = rows.value.exact[j][c] - exact[c];
        const double by_value = rows.value.steps[j][c];
        const double by_weight = steps[j] * rows.value.exact[j][c];
        variance += p[j] * p[j] * (by_key * by_key * score_squares[j] + by_value * by_value) / 12 +
                    by_weight * by_weight / 12;
      }
      const double z = (got[c] - exact[c]) / std::sqrt(variance);
      squares_ += z * z;
      largest_ = std::max(largest_, std::isfinite(z) ? std::abs(z) : INFINITY);
      ++count_;
    }
  }

  // Statistics of thousands of elements, of which those of a row are correlated.
  bool ArePlausible() const {
    const double mean = std::sqrt(squares_ / count_);
    return mean > 0.7 && mean < 1.4 && largest_ < 6;
  }
  std::string ToString() const {
    return "root mean square " + std::to_string(std::sqrt(squares_ / count_)) + ", largest " +
           std::to_string(largest_);
  }

 private:
  const Precision precision_;
  double squares_ = 0, largest_ = 0;
  int count_ = 0;
};

// For each query row and head of the problem, which masks nothing: fn(row, head, query, K/V rows).
template <class Fn>
void ForEachRow(const ProblemSpan& problem, const Fn& fn) {
  const Geometry& g = problem.geometry();
  for (int32_t kv_head = 0; kv_head < g.num_kv_heads; ++kv_head) {
    const KvRows rows(problem, kv_head);
    for (int32_t row = 0; row < problem.span().query_rows; ++row) {
      for (int32_t h = kv_head * g.group(); h < (kv_head + 1) * g.group(); ++h) {
        fn(row, h, DecodedQuery(g, problem.span(), row, h), rows);
      }
    }
  }
}

TEST(Kv8BitError, IsThatOfTheStoredRowsAndShowsAWrongScale) {
  std::mt19937_64 random(TestSeed());
  struct Case {
    KvDType kv_dtype;
    int32_t head_dim;
    Precision precision = Precision::k16Bit;
  };
  for (const Case& c : std::vector<Case>{{KvDType::kInt8, 64},
                                         {KvDType::kInt8, 128},
                                         {KvDType::kInt8, 64, Precision::kInt8Qk},
                                         {KvDType::kInt8, 64, Precision::kInt8QkPv},
                                         {KvDType::kFloat8E4M3, 64},
                                         {KvDType::kFloat8E4M3, 128}}) {
    SCOPED_TRACE(std::string(Name(c.kv_dtype)) + ", " + Name(c.precision));
    const Geometry geometry{DType::kFloat16, kHeads, kKvHeads, c.head_dim, c.kv_dtype, c.precision};
    Problem problem(geometry, {UnevenSpan(8, 400)}, &random);
    const double scale = problem.span(0).span().terms.softmax_scale;
    Deviations right(c.precision), wrong_query(c.precision), wrong_key(c.precision),
        wrong_value(c.precision), few_bits(c.precision), nothing(c.precision);
    ForEachRow(problem.span(0), [&](int32_t, int32_t, const auto& query, const KvRows& rows) {
      const bool rounds_p = c.precision == Precision::kInt8QkPv;
      const auto add = [&](const auto& rounded_query, const auto& key, const auto& value,
                           double p_codes, Deviations* to) {
        std::vector<double> weights = Weights(rounded_query, scale, key);
        if (rounds_p) weights = RoundWeights(p_codes, rows.value, std::move(weights));
        to->Add(query, scale, rows, 0, Sum(weights, value));
      };
      const auto rounded = [&query](int32_t codes) {
        std::vector<double> result = query;
        RoundQuery(
            codes, [](double code) { return code; }, &result);
        return result;
      };
      const std::vector<double> q =
          c.precision == Precision::k16Bit ? query : rounded(LargestQueryCode(c.precision));
      add(q, rows.key.stored, rows.value.stored, 255, &right);
      add(rounded(c.kv_dtype == KvDType::kInt8 ? 15 : 3), rows.key.stored, rows.value.stored, 255,
          &wrong_query);
      add(q, rows.key.WithScalesOfNeighbours(), rows.value.stored, 255, &wrong_key);
      add(q, rows.key.stored, rows.value.WithScalesOfNeighbours(), 255, &wrong_value);
      add(q, rows.key.stored, rows.value.stored, 31, &few_bits);
      nothing.Add(query, scale, rows, 0,
                  Sum(Weights(query, scale, rows.key.exact), rows.value.exact));
    });
    EXPECT_TRUE(right.ArePlausible()) << right.ToString();
    EXPECT_FALSE(wrong_value.ArePlausible()) << wrong_value.ToString();
    EXPECT_FALSE(wrong_key.ArePlausible()) << wrong_key.ToString();
    EXPECT_FALSE(wrong_query.ArePlausible()) << wrong_query.ToString();
    EXPECT_EQ(few_bits.ArePlausible(), c.precision != Precision::kInt8QkPv) << few_bits.ToString();
    EXPECT_FALSE(nothing.ArePlausible()) << "unquantised K/V is not 8-bit";
  }
}

class Attention8BitTest : public AttentionTest {};

TEST_P(Attention8BitTest, TheErrorIsThatOfTheStoredRows) {
  const Geometry geometry = MakeGeometry(kHeads, kKvHeads);
  for (const auto& [query_rows, kv_rows] : {std::pair{3, 700}, {40, 300}}) {
    Problem problem(geometry, {UnevenSpan(query_rows, kv_rows)}, &random_);
    Run(problem.batch());
    const std::vector<uint16_t> output = problem.span(0).Output();
    Deviations deviations(PrecisionFor(geometry, query_rows));
    ForEachRow(
        problem.span(0), [&](int32_t row, int32_t head, const auto& query, const auto& rows) {
          std::vector<double> got;
          for (int32_t d = 0; d < geometry.head_dim; ++d) {
            got.push_back(
                ToFloat(geometry.dtype, output[(row * kHeads + head) * geometry.head_dim + d]));
          }
          deviations.Add(query, problem.span(0).span().terms.softmax_scale, rows,
                         KernelRounding(geometry, problem.span(0).span()).output, got);
        });
    EXPECT_TRUE(deviations.ArePlausible()) << deviations.ToString();
  }
}

// Rows of Q that are zeros, or so small that 127 divided by the largest element is not finite in
// float32: all K/V rows count the same.
TEST_P(Attention8BitTest, TinyQueries) {
  const Geometry geometry = MakeGeometry(kHeads, kKvHeads);
  Problem problem(geometry, {UnevenSpan(20, 150), UnevenSpan(1, 700)}, &random_);
  for (int s = 0; s < problem.num_spans(); ++s) {
    ProblemSpan& span = problem.span(s);
    for (int32_t i = 0; i < span.span().query_rows; ++i) {
      for (int32_t h = 0; h < kHeads; ++h) {
        for (int32_t d = 0; d < geometry.head_dim; ++d) {
          uint16_t& bits = span.QueryRow(i, h)[d];
          bits &= (i + h) % 2 == 0 ? 0x8000 : 0x8001;  // zeros, or the smallest subnormals
        }
      }
    }
  }
  Check(&problem);
}

class AttentionPrecisionTest : public AttentionTest {};

// Spans of few packed rows get the bits of 16-bit products; others do not.
TEST_P(AttentionPrecisionTest, FewRowsHave16BitProducts) {
  const Kernel& kernel = GetParam();
  KernelSpec spec = kernel.spec;
  spec.precision = Precision::k16Bit;
  const Kernel* const precise = FindKernel(spec);
  ASSERT_NE(precise, nullptr) << ExplainMissing(spec);
  Problem problem(MakeGeometry(kHeads, kKvHeads),
                  {{1, 700}, {8, 2100, Mask::Causal()}, {9, 300}, {40, 130, Mask::Causal()}},
                  &random_);
  AttentionBatch batch = problem.batch();
  const auto run = [&](const Kernel& with) {
    problem.PoisonOutputs();
    batch.geometry.precision = with.spec.precision;
    Plan plan;
    MakePlan(batch, with.plan_options, kManyWorkers, &plan);
    EXPECT_EQ(Launch(with, batch, plan, nullptr), 0);
    return problem.outputs();
  };
  const Problem::Outputs got = run(kernel), want = run(*precise);
  for (int s = 0; s < problem.num_spans(); ++s) {
    const bool few =
        PrecisionFor(problem.geometry(), problem.span(s).span().query_rows) == Precision::k16Bit;
    EXPECT_EQ(few, s < 2);
    EXPECT_EQ(got.output[s] == want.output[s], few) << "span " << s;
    EXPECT_EQ(got.lse[s] == want.lse[s], few) << "span " << s;
  }
}

// A build without CUDA has none.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionPrecisionTest);
INSTANTIATE_TEST_SUITE_P(Kernels, AttentionPrecisionTest,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return spec.precision != Precision::k16Bit;
                         })),
                         testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(Kernels, Attention8BitTest,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return Is8Bit(spec.kv_dtype);
                         })),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
