// The error of 8-bit K/V against float64 attention over the unquantised K/V: with a perfect kernel,
// and with every kernel of the registry that reads it. attention_test.cc compares kernels with
// attention over the stored rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/reference.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/attention_fixture.h"
#include "tests/kernels/error_bound.h"
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

// An error divided by its standard deviation. Each element of a stored row is off by a number that
// is uniform in half a step and independent of the others. So with p the probabilities and a the
// softmax scale, O[c] = sum p v[c] is off by p * (v[c] - O[c]) * a * q . (error of k), summed over
// the rows, and p * (error of v[c]), and by its own rounding.
class Deviations {
 public:
  void Add(const std::vector<double>& query, double scale, const KvRows& rows, double unit_roundoff,
           const std::vector<double>& got) {
    const std::vector<double> p = Weights(query, scale, rows.key.exact);
    const std::vector<double> exact = Sum(p, rows.value.exact);
    std::vector<double> score_squares(p.size(), 0);  // of the errors of scores, times 12
    for (size_t j = 0; j < p.size(); ++j) {
      for (size_t d = 0; d < query.size(); ++d) {
        score_squares[j] += std::pow(scale * query[d] * rows.key.steps[j][d], 2);
      }
    }
    for (size_t c = 0; c < exact.size(); ++c) {
      double variance = std::pow(unit_roundoff * exact[c], 2) / 3;
      for (size_t j = 0; j < p.size(); ++j) {
        const double by_key = rows.value.exact[j][c] - exact[c];
        const double by_value = rows.value.steps[j][c];
        variance += p[j] * p[j] * (by_key * by_key * score_squares[j] + by_value * by_value) / 12;
      }
      const double z = (got[c] - exact[c]) / std::sqrt(variance);
      squares_ += z * z;
      largest_ = std::max(largest_, std::isfinite(z) ? std::abs(z) : INFINITY);
      ++count_;
    }
  }

  // Of thousands of elements, of which those of a row are correlated.
  bool ArePlausible() const {
    const double mean = std::sqrt(squares_ / count_);
    return mean > 0.7 && mean < 1.4 && largest_ < 6;
  }
  std::string ToString() const {
    return "root mean square " + std::to_string(std::sqrt(squares_ / count_)) + ", largest " +
           std::to_string(largest_);
  }

 private:
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
  for (const auto& [kv_dtype, head_dim] : {std::pair{KvDType::kInt8, 64},
                                           {KvDType::kInt8, 128},
                                           {KvDType::kFloat8E4M3, 64},
                                           {KvDType::kFloat8E4M3, 128}}) {
    const Geometry geometry{DType::kFloat16, kHeads, kKvHeads, head_dim, kv_dtype};
    Problem problem(geometry, {UnevenSpan(8, 400)}, &random);
    const double scale = problem.span(0).span().softmax_scale;
    Deviations right, wrong_key, wrong_value, nothing;
    ForEachRow(problem.span(0), [&](int32_t, int32_t, const auto& query, const KvRows& rows) {
      const auto add = [&](const auto& key, const auto& value, Deviations* to) {
        to->Add(query, scale, rows, 0, Sum(Weights(query, scale, key), value));
      };
      add(rows.key.stored, rows.value.stored, &right);
      add(rows.key.WithScalesOfNeighbours(), rows.value.stored, &wrong_key);
      add(rows.key.stored, rows.value.WithScalesOfNeighbours(), &wrong_value);
      add(rows.key.exact, rows.value.exact, &nothing);
    });
    EXPECT_TRUE(right.ArePlausible()) << right.ToString();
    EXPECT_FALSE(wrong_value.ArePlausible()) << wrong_value.ToString();
    EXPECT_FALSE(wrong_key.ArePlausible()) << wrong_key.ToString();
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
    Deviations deviations;
    ForEachRow(
        problem.span(0), [&](int32_t row, int32_t head, const auto& query, const auto& rows) {
          std::vector<double> got;
          for (int32_t d = 0; d < geometry.head_dim; ++d) {
            got.push_back(
                ToFloat(geometry.dtype, output[(row * kHeads + head) * geometry.head_dim + d]));
          }
          deviations.Add(query, problem.span(0).span().softmax_scale, rows, KernelRounding().output,
                         got);
        });
    EXPECT_TRUE(deviations.ArePlausible()) << deviations.ToString();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Attention8BitTest,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return Is8Bit(spec.kv_dtype);
                         })),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
