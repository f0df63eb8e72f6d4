#include "tests/kernels/rounded_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/half.h"

namespace flashcore::kernels {
namespace {

// The online softmax of one query row over a range of K/V rows.
class RowState {
 public:
  RowState(const KernelSpec& spec, const Rounding& rounding, const DecodedKv& kv,
           const std::vector<double>& query, const Terms& terms)
      : spec_(spec),
        rounding_(rounding),
        kv_(kv),
        query_(query),
        terms_(terms),
        output_(kv.head_dim(), 0) {}

  void AddTile(KvRange rows) {
    float scores[kPageTokens];
    float largest = max_;
    for (int32_t j = rows.begin; j < rows.end; ++j) {
      scores[j - rows.begin] = Score(j);
      largest = std::max(largest, scores[j - rows.begin]);
    }
    const float factor = max_ == kNothing ? 0 : std::exp(max_ - largest);
    if (factor != 1) {
      for (float& o : output_) o = ToSum(o * factor);
      sum_ *= factor;
      rounded_sum_ *= factor;
    }
    max_ = largest;
    if (rounding_.tile_weight > 0) {
      AddCodes(rows, scores);
      return;
    }
    for (int32_t j = rows.begin; j < rows.end; j += 16) {
      AddValues({j, std::min(j + 16, rows.end)}, scores + (j - rows.begin));
    }
  }

  // O relative to e^max, and the sum that normalises it.
  const std::vector<float>& output() const { return output_; }
  float max() const { return max_; }
  float sum() const { return sum_; }
  float normaliser() const { return rounded_sum_; }

 private:
  float ToSum(double value) const {
    const float single = static_cast<float>(value);
    if (spec_.accumulate == Accumulate::kFloat32) return single;
    return ToFloat(DType::kFloat16, FromFloat(DType::kFloat16, single));
  }

  float Score(int32_t j) const {
    const float* key = kv_.Key(j);
    float sum = 0;
    if (rounding_.query_codes > 0) {  // integers are summed exactly
      double exact = 0;
      for (int32_t d = 0; d < kv_.head_dim(); ++d) exact += query_[d] * key[d];
      return terms_.Score(static_cast<float>(exact));
    }
    for (int32_t d = 0; d < kv_.head_dim(); d += 8) {
      double step = sum;
      for (int32_t n = d; n < d + 8; ++n) step += query_[n] * key[n];
      sum = ToSum(step);
    }
    return terms_.Score(sum);
  }

  void AddValues(KvRange rows, const float* scores) {
    float p[16];
    for (int32_t j = rows.begin; j < rows.end; ++j) {
      float& one = p[j - rows.begin];
      one = std::exp(scores[j - rows.begin] - max_);
      sum_ += one;
      if (rounding_.probability_dtype.has_value()) {
        const DType dtype = *rounding_.probability_dtype;
        one = ToFloat(dtype, FromFloat(dtype, one));
      }
      rounded_sum_ += one;
    }
    for (int32_t d = 0; d < kv_.head_dim(); ++d) {
      double step = output_[d];
      for (int32_t j = rows.begin; j < rows.end; ++j) {
        step += double{p[j - rows.begin]} * kv_.Value(j)[d];
      }
      output_[d] = ToSum(step);
    }
  }

  // With P of 8 bits.
  void AddCodes(KvRange rows, const float* scores) {
    double weights[kPageTokens] = {};
    double largest = 0;
    for (int32_t j = rows.begin; j < rows.end; ++j) {
      const float p = std::exp(scores[j - rows.begin] - max_);
      sum_ += p;
      rounded_sum_ += p;
      weights[j - rows.begin] = double{p} * kv_.ValueScale(j);
      largest = std::max(largest, weights[j - rows.begin]);
    }
    if (largest == 0) return;
    const double factor = kLargestProbabilityCode / largest;
    for (double& weight : weights) weight = std::nearbyint(weight * factor);
    for (int32_t d = 0; d < kv_.head_dim(); ++d) {
      double sum = 0;
      for (int32_t j = rows.begin; j < rows.end; ++j) {
        if (weights[j - rows.begin] == 0) continue;
        sum += weights[j - rows.begin] * kv_.Value(j)[d] / kv_.ValueScale(j);
      }
      output_[d] += static_cast<float>(sum / factor);
    }
  }

  const KernelSpec& spec_;
  const Rounding& rounding_;
  const DecodedKv& kv_;
  const std::vector<double>& query_;
  const Terms terms_;
  std::vector<float> output_;
  float max_ = kNothing;
  float sum_ = 0;
  float rounded_sum_ = 0;
};

// Merges the splits of a row, and appends it to `*result`.
void Finish(const KernelSpec& spec, const DecodedKv& kv, const std::vector<RowState>& splits,
            AttentionResult* result) {
  float max = kNothing;
  for (const RowState& split : splits) max = std::max(max, split.max());
  std::vector<float> output(kv.head_dim(), 0);
  float sum = 0;
  for (const RowState& split : splits) {
    if (split.max() == kNothing) continue;
    const float weight = std::exp(split.max() - max);
    sum += weight * split.sum();
    const float factor = weight * split.sum() / split.normaliser();
    for (int32_t d = 0; d < kv.head_dim(); ++d) output[d] += factor * split.output()[d];
  }
  for (float o : output) {
    const float value = sum == 0 ? 0 : o / sum;
    result->output.push_back(ToFloat(spec.dtype, FromFloat(spec.dtype, value)));
  }
  result->lse.push_back(sum == 0 ? kNothing : max + std::log(sum));
}

}  // namespace

AttentionResult RoundedAttention(const KernelSpec& spec, const PlanOptions& options,
                                 const Geometry& geometry, const Span& span) {
  const Rounding rounding = RoundingOf(spec, options, geometry, span);
  const int32_t split_rows = std::min(std::max(1, span.kv.rows), rounding.split_rows);
  std::vector<DecodedKv> kv;
  for (int32_t head = 0; head < geometry.num_kv_heads; ++head) {
    kv.emplace_back(geometry, span.kv, head, KvRange{0, span.kv.rows});
  }
  AttentionResult result;
  for (int32_t i = 0; i < span.query_rows; ++i) {
    const KvRange visible = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, i, i + 1);
    for (int32_t h = 0; h < geometry.num_heads; ++h) {
      const DecodedKv& head = kv[h / geometry.group()];
      const std::vector<double> query = DecodedQuery(geometry, span, i, h, rounding.query_codes);
      std::vector<RowState> splits;
      for (int32_t begin = visible.begin; begin < visible.end; begin += split_rows) {
        const int32_t end = std::min(visible.end, begin + split_rows);
        splits.emplace_back(spec, rounding, head, query, span.terms);
        int32_t j = begin;
        while (j < end) {
          const int32_t next = std::min(end, (j / kPageTokens + 1) * kPageTokens);
          splits.back().AddTile({j, next});
          j = next;
        }
      }
      Finish(spec, head, splits, &result);
    }
  }
  return result;
}

}  // namespace flashcore::kernels
