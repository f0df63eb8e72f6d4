// The error of INT8 K/V against float64 attention over the unquantised K/V: with a perfect kernel,
// and with every kernel of the registry that reads INT8. attention_test.cc compares kernels with
// attention over the stored rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/kv_pages.h"
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

double ScaleOf(const KvView& kv, const std::byte* base, int32_t kv_head, int32_t j) {
  const std::byte* page = base + kv.pages[j / kPageTokens] * kv.page_stride +
                          kv_head * kv.head_stride + kPageTokens * kv.row_stride;
  uint16_t bits;
  std::memcpy(&bits, page + j % kPageTokens * sizeof(bits), sizeof(bits));
  return BFloat16ToFloat(bits);
}

struct KvRows {
  KvRows(const ProblemSpan& problem, int32_t kv_head) {
    const Geometry& stored = problem.geometry();
    Geometry exact = stored;
    exact.kv_dtype = KvDType::kSameAsQuery;
    const KvView& kv = problem.span().kv;
    const KvRange all{0, kv.rows};
    const DecodedKv stored_rows(stored, kv, kv_head, all);
    const DecodedKv exact_rows(exact, problem.unquantised().kv, kv_head, all);
    const auto copy = [&](const float* row) {
      return std::vector<double>(row, row + stored.head_dim);
    };
    for (int32_t j = 0; j < kv.rows; ++j) {
      key.exact.push_back(copy(exact_rows.Key(j)));
      key.stored.push_back(copy(stored_rows.Key(j)));
      key.scales.push_back(ScaleOf(kv, kv.key, kv_head, j));
      value.exact.push_back(copy(exact_rows.Value(j)));
      value.stored.push_back(copy(stored_rows.Value(j)));
      value.scales.push_back(ScaleOf(kv, kv.value, kv_head, j));
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
// is uniform in half a scale and independent of the others. So with p the probabilities and a the
// softmax scale, O[c] = sum p v[c] is off by p * (v[c] - O[c]) * a * q . (error of k), summed over
// the rows, and p * (error of v[c]), and by its own rounding.
class Deviations {
 public:
  void Add(const std::vector<double>& query, double scale, const KvRows& rows, double unit_roundoff,
           const std::vector<double>& got) {
    const std::vector<double> p = Weights(query, scale, rows.key.exact);
    const std::vector<double> exact = Sum(p, rows.value.exact);
    double query_squares = 0;
    for (const double q : query) query_squares += q * q;
    for (size_t c = 0; c < exact.size(); ++c) {
      double variance = std::pow(unit_roundoff * exact[c], 2) / 3;
      for (size_t j = 0; j < p.size(); ++j) {
        const double by_key = (rows.value.exact[j][c] - exact[c]) * scale * rows.key.scales[j];
        const double by_value = rows.value.scales[j];
        variance += p[j] * p[j] * (by_key * by_key * query_squares + by_value * by_value) / 12;
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

TEST(Int8Error, IsThatOfTheStoredRowsAndShowsAWrongScale) {
  std::mt19937_64 random(TestSeed());
  for (const int32_t head_dim : {64, 128}) {
    const Geometry geometry{DType::kFloat16, kHeads, kKvHeads, head_dim, KvDType::kInt8};
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
    EXPECT_FALSE(nothing.ArePlausible()) << "unquantised K/V is no INT8";
  }
}

class AttentionInt8Test : public AttentionTest {};

TEST_P(AttentionInt8Test, TheErrorIsThatOfTheStoredRows) {
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

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionInt8Test,
                         testing::ValuesIn(KernelsWhere([](const KernelSpec& spec) {
                           return spec.kv_dtype == KvDType::kInt8;
                         })),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
