#include "tests/kernels/faults.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace flashcore::kernels {
namespace {

constexpr double kWeighty = 0.05;  // of the largest weight of a query row
constexpr size_t kEndRows = 16;
// A visible change of O. Rows that see one and the same K/V row, or all with scale 0, have one O:
// exchanging them changes nothing.
constexpr double kVisibleChange = 0.05;
constexpr double kWrongCodes = 127;            // of P
constexpr double kVisibleVariances = 5;        // of the error of P of 8 bits
constexpr double kVisibleLseChange = 0x1p-15;  // relative to the LSE or 1

int32_t Below(int32_t n, std::mt19937_64* random) {
  return static_cast<int32_t>((*random)() % static_cast<uint64_t>(n));
}

// The least weight of a K/V row that matters.
double LeastWeight(const std::vector<double>& weights, double of_largest) {
  return std::max(0.5 / weights.size(),
                  of_largest * *std::max_element(weights.begin(), weights.end()));
}

}  // namespace

const char* Name(Fault fault) {
  const char* const names[] = {"zeros",         "lost row",   "lost V row",    "lost tile",
                               "lost end",      "mask edge",  "swapped heads", "swapped rows",
                               "wrong KV head", "scale of Q", "bits of Q",     "bits of P"};
  return names[static_cast<int>(fault)];
}

FaultySpan::FaultySpan(const Geometry& geometry, const Span& span, const Rounding& rounding,
                       const AttentionResult& exact)
    : g_(geometry), span_(span), rounding_(rounding), exact_(exact) {
  for (int32_t head = 0; head < g_.num_kv_heads; ++head) {
    kv_.emplace_back(g_, span.kv, head, KvRange{0, span.kv.rows});
  }
}

std::optional<AttentionResult> FaultySpan::With(Fault fault, std::mt19937_64* random) const {
  const int32_t last = span_.query_rows - 1, heads = g_.num_heads;
  const bool only_value = fault == Fault::kLostValue;
  const int32_t kv_row = WeightyRow(only_value ? 0.25 : kWeighty, random);
  if (kv_row < 0) return {};  // no query row sees anything
  const int32_t tile = kv_row / kPageTokens * kPageTokens;
  switch (fault) {
    case Fault::kZeros:
      return AttentionResult{std::vector<double>(exact_.output.size(), 0), exact_.lse};
    case Fault::kLostRow:
    case Fault::kLostValue:
      return Without({kv_row, kv_row + 1}, only_value);
    case Fault::kLostTile:
      return Without({tile, tile + kPageTokens}, false);
    case Fault::kLostEnd:
      return WithoutEnd(random);
    case Fault::kMaskEdge:
      return WithWrongEdge(random);
    case Fault::kSwappedHeads: {
      if (heads < 2) return {};
      const int32_t head = Below(heads - 1, random);
      return Swapped(last, head, last, head + 1);
    }
    case Fault::kSwappedRows: {
      if (last == 0) return {};
      const int32_t head = Below(heads, random);
      return Swapped(last, head, last - 1, head);
    }
    case Fault::kWrongKvHead:
      return WithWrongKvHead();
    case Fault::kQueryScale:
      return WithQueryScale(random);
    case Fault::kQueryBits:
      return WithQueryBits(random);
    case Fault::kProbability:
      return WithProbabilityBits();
    case Fault::kCount:
      break;
  }
  return {};
}

KvRange FaultySpan::Visible(int32_t row) const {
  return VisibleKv(span_.terms.mask, span_.query_rows, span_.kv.rows, row, row + 1);
}

double FaultySpan::Score(const std::vector<double>& query, int32_t head, int32_t kv_row) const {
  const float* key = Kv(head).Key(kv_row);
  double dot = 0;
  for (int32_t d = 0; d < g_.head_dim; ++d) dot += query[d] * key[d];
  return span_.terms.Score(dot);
}

RowAttention<double> FaultySpan::Attend(int32_t row, int32_t head,
                                        std::vector<double> query) const {
  return AttendExactly({row, head, std::move(query), span_.terms, Kv(head), Visible(row)});
}

std::vector<double> FaultySpan::Weights(int32_t row, int32_t head) const {
  return Attend(row, head, Query(row, head)).weights;
}

double FaultySpan::Sum(const std::vector<double>& query, int32_t head, KvRange kv_rows, double base,
                       std::vector<double>* weighted) const {
  double sum = 0;
  for (int32_t j = kv_rows.begin; j < kv_rows.end; ++j) {
    const double weight = std::exp(Score(query, head, j) - base);
    sum += weight;
    const float* value = Kv(head).Value(j);
    for (int32_t d = 0; d < g_.head_dim; ++d) {
      (*weighted)[d] += weight * value[d];
    }
  }
  return sum;
}

int32_t FaultySpan::WeightyRow(double of_largest, std::mt19937_64* random) const {
  if (span_.query_rows == 0) return -1;
  const int32_t first = Below(span_.query_rows, random);
  for (int32_t n = 0; n < span_.query_rows; ++n) {
    const int32_t row = (first + n) % span_.query_rows;
    const std::vector<double> weights = Weights(row, Below(g_.num_heads, random));
    if (weights.empty()) continue;
    const double least = LeastWeight(weights, of_largest);
    std::vector<int32_t> weighty;
    for (size_t k = 0; k < weights.size(); ++k) {
      if (weights[k] < least) continue;
      weighty.push_back(Visible(row).begin + static_cast<int32_t>(k));
    }
    return weighty[Below(static_cast<int32_t>(weighty.size()), random)];
  }
  return -1;
}

bool FaultySpan::DiffersByAWeightyRow(const AttentionResult& changed) const {
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    for (int32_t h = 0; h < g_.num_heads; ++h) {
      const double before = exact_.lse[Index(i, h)], after = changed.lse[Index(i, h)];
      if (std::isinf(before) != std::isinf(after)) return true;
      if (std::isinf(before) || before == after) continue;
      const double weight = std::abs(std::expm1(after - before));
      if (weight >= LeastWeight(Weights(i, h), kWeighty)) return true;
    }
  }
  return false;
}

std::optional<AttentionResult> FaultySpan::WithWrongEdge(std::mt19937_64* random) const {
  std::vector<Span> spans;
  for (int32_t by : {-1, 1}) {
    for (int32_t Mask::*edge : {&Mask::left, &Mask::right}) {
      if (span_.terms.mask.*edge == Mask::kUnbounded) continue;
      spans.push_back(span_);
      spans.back().terms.mask.*edge += by;
    }
  }
  std::shuffle(spans.begin(), spans.end(), *random);
  for (const Span& span : spans) {
    AttentionResult changed = ExpectedOf(g_, span, rounding_).exact;
    if (DiffersByAWeightyRow(changed)) return changed;
  }
  return {};
}

std::optional<AttentionResult> FaultySpan::WithWrongKvHead() const {
  if (g_.num_kv_heads < 2) return {};
  Span span = span_;
  const int64_t last = (g_.num_kv_heads - 1) * span.kv.head_stride;
  span.kv.key += last;
  span.kv.value += last;
  span.kv.head_stride *= -1;
  return ExpectedOf(g_, span, rounding_).exact;
}

std::optional<AttentionResult> FaultySpan::WithoutEnd(std::mt19937_64* random) const {
  const int32_t row = span_.query_rows - 1, end = Visible(row).end;
  const std::vector<double> weights = Weights(row, Below(g_.num_heads, random));
  const size_t count = std::min(kEndRows, weights.size());
  double lost = 0;
  for (size_t n = 0; n < count; ++n) lost += weights[weights.size() - 1 - n];
  if (weights.empty() || lost < LeastWeight(weights, kWeighty)) return {};
  return Without({end - static_cast<int32_t>(count), end}, false);
}

std::optional<AttentionResult> FaultySpan::WithQueryScale(std::mt19937_64* random) const {
  const int32_t row = span_.query_rows - 1, head = Below(g_.num_heads, random);
  if (rounding_.query_codes == 0 || (row == 0 && g_.num_heads == 1)) return {};
  std::vector<double> query = Query(row, head);
  const std::vector<double> other =
      row > 0 ? Query(row - 1, head) : Query(row, (head + 1) % g_.num_heads);
  const double factor = LargestMagnitude(other) / LargestMagnitude(query);
  for (double& element : query) element *= factor;
  return WithQuery(row, head, query);
}

std::optional<AttentionResult> FaultySpan::WithQueryBits(std::mt19937_64* random) const {
  if (rounding_.query_codes == 0) return {};
  const int32_t row = span_.query_rows - 1, head = Below(g_.num_heads, random);
  const int32_t lost = rounding_.query_codes > kLowQueryCodes ? kLowQueryCodes : 2;
  std::vector<double> query = Query(row, head);
  RoundQuery(
      rounding_.query_codes, [lost](double code) { return lost * std::floor(code / lost); },
      &query);
  return WithQuery(row, head, query);
}

std::optional<AttentionResult> FaultySpan::WithQuery(int32_t row, int32_t head,
                                                     const std::vector<double>& query) const {
  const size_t at = Index(row, head);
  const RowAttention<double> wrong = Attend(row, head, query);
  if (!(std::abs(wrong.lse - exact_.lse[at]) > kVisibleLseChange * (1 + std::abs(wrong.lse)))) {
    return {};
  }
  AttentionResult result = exact_;
  result.lse[at] = wrong.lse;
  std::copy(wrong.output.begin(), wrong.output.end(), result.output.begin() + at * g_.head_dim);
  return result;
}

std::optional<AttentionResult> FaultySpan::WithProbabilityBits() const {
  if (rounding_.tile_weight == 0) return {};
  AttentionResult result = exact_;
  bool is_visible = false;
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    for (int32_t h = 0; h < g_.num_heads; ++h) {
      if (RoundProbabilities(i, h, &result)) is_visible = true;
    }
  }
  if (!is_visible) return {};
  return result;
}

bool FaultySpan::RoundProbabilities(int32_t row, int32_t head, AttentionResult* result) const {
  const KvRange visible = Visible(row);
  const DecodedKv& kv = Kv(head);
  const std::vector<double> weights = Weights(row, head);
  double* const output = result->output.data() + Index(row, head) * g_.head_dim;
  std::vector<double> change(g_.head_dim, 0);
  double largest = 0;   // of the products of a tile
  double variance = 0;  // of the error of 8 bits, summed over head_dim
  const auto product = [&](int32_t j) { return weights[j - visible.begin] * kv.ValueScale(j); };
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    if (j == visible.begin || j % kPageTokens == 0) {
      const int32_t end = std::min(visible.end, (j / kPageTokens + 1) * kPageTokens);
      largest = 0;
      for (int32_t n = j; n < end; ++n) largest = std::max(largest, product(n));
    }
    if (largest == 0) continue;
    const double step = largest / kWrongCodes / kv.ValueScale(j);
    const double weight = step * std::nearbyint(weights[j - visible.begin] / step);
    const double step_of_8_bits = step * kWrongCodes / kLargestProbabilityCode;
    for (int32_t d = 0; d < g_.head_dim; ++d) {
      const double value = kv.Value(j)[d];
      change[d] += (weight - weights[j - visible.begin]) * value;
      variance += std::pow(step_of_8_bits * value, 2) / 12;
    }
  }
  double squares = 0, stored = 0;
  for (int32_t d = 0; d < g_.head_dim; ++d) {
    stored += std::pow(rounding_.output * output[d], 2);
    squares += change[d] * change[d];
    output[d] += change[d];
  }
  return weights.size() >= kPageTokens && squares > kVisibleVariances * variance + 3 * stored;
}

AttentionResult FaultySpan::Without(KvRange lost, bool only_values) const {
  AttentionResult result = exact_;
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    const KvRange visible = Visible(i);
    const KvRange range = {std::max(lost.begin, visible.begin), std::min(lost.end, visible.end)};
    if (range.begin >= range.end) continue;
    for (int32_t h = 0; h < g_.num_heads; ++h) Remove(i, h, range, visible, only_values, &result);
  }
  return result;
}

void FaultySpan::Remove(int32_t row, int32_t head, KvRange lost, KvRange visible, bool only_values,
                        AttentionResult* result) const {
  double* const output = result->output.data() + Index(row, head) * g_.head_dim;
  double& lse = result->lse[Index(row, head)];
  std::vector<double> weighted(g_.head_dim, 0);
  const std::vector<double> query = Query(row, head);
  const double sum = Sum(query, head, lost, lse, &weighted);
  if (only_values || sum < 0.999) {
    const double left = only_values ? 1 : 1 - sum;
    for (int32_t d = 0; d < g_.head_dim; ++d) output[d] = (output[d] - weighted[d]) / left;
    lse += std::log(left);
    return;
  }
  // Nearly all the weight is lost: add up what is left.
  double base = kNothing;
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    if (j < lost.begin || j >= lost.end) base = std::max(base, Score(query, head, j));
  }
  std::fill(weighted.begin(), weighted.end(), 0.0);
  const double left = Sum(query, head, {visible.begin, lost.begin}, base, &weighted) +
                      Sum(query, head, {lost.end, visible.end}, base, &weighted);
  for (int32_t d = 0; d < g_.head_dim; ++d) output[d] = left == 0 ? 0 : weighted[d] / left;
  lse = left == 0 ? kNothing : base + std::log(left);
}

std::optional<AttentionResult> FaultySpan::Swapped(int32_t row, int32_t head, int32_t other_row,
                                                   int32_t other_head) const {
  AttentionResult result = exact_;
  const size_t a = Index(row, head), b = Index(other_row, other_head), size = g_.head_dim;
  double squares = 0, change = 0;
  for (size_t d = 0; d < size; ++d) {
    double &x = result.output[a * size + d], &y = result.output[b * size + d];
    squares += x * x;
    change += (x - y) * (x - y);
    std::swap(x, y);
  }
  if (change <= kVisibleChange * kVisibleChange * squares) return {};
  std::swap(result.lse[a], result.lse[b]);
  return result;
}

}  // namespace flashcore::kernels
