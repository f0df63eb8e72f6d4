#include "tests/kernels/faults.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashcore::kernels {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr double kWeighty = 0.05;  // of the largest weight of a query row
constexpr size_t kEndRows = 16;
// Of O. Rows that see one and the same K/V row, or all with scale 0, have one O: exchanging them
// changes nothing.
constexpr double kVisibleChange = 0.05;

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
  const char* const names[] = {"zeros",         "lost row",     "lost V row",
                               "lost tile",     "lost end",     "mask edge",
                               "swapped heads", "swapped rows", "wrong KV head"};
  return names[static_cast<int>(fault)];
}

FaultySpan::FaultySpan(const Geometry& geometry, const Span& span, const SpanResult& exact)
    : g_(geometry), span_(span), exact_(exact) {
  for (int32_t head = 0; head < g_.num_kv_heads; ++head) {
    kv_.emplace_back(g_, span.kv, head, KvRange{0, span.kv.rows});
  }
}

std::optional<SpanResult> FaultySpan::With(Fault fault, std::mt19937_64* random) const {
  const int32_t last = span_.query_rows - 1, heads = g_.num_heads;
  const bool only_value = fault == Fault::kLostValue;
  const int32_t kv_row = WeightyRow(only_value ? 0.25 : kWeighty, random);
  if (kv_row < 0) return {};  // no query row sees anything
  const int32_t tile = kv_row / kPageTokens * kPageTokens;
  switch (fault) {
    case Fault::kZeros:
      return SpanResult{std::vector<double>(exact_.output.size(), 0), exact_.lse};
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
    case Fault::kCount:
      break;
  }
  return {};
}

KvRange FaultySpan::Visible(int32_t row) const {
  return VisibleKv(span_.mask, span_.query_rows, span_.kv.rows, row, row + 1);
}

double FaultySpan::Score(const std::vector<double>& query, int32_t head, int32_t kv_row) const {
  const float* key = Kv(head).Key(kv_row);
  double dot = 0;
  for (int32_t d = 0; d < g_.head_dim; ++d) dot += query[d] * key[d];
  return dot * span_.softmax_scale;
}

std::vector<double> FaultySpan::Weights(int32_t row, int32_t head) const {
  const std::vector<double> query = DecodedQuery(g_, span_, row, head);
  const KvRange visible = Visible(row);
  std::vector<double> weights;
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    weights.push_back(std::exp(Score(query, head, j) - exact_.lse[Index(row, head)]));
  }
  return weights;
}

double FaultySpan::Sum(int32_t row, int32_t head, KvRange kv_rows, double base,
                       std::vector<double>* weighted) const {
  const std::vector<double> query = DecodedQuery(g_, span_, row, head);
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

bool FaultySpan::DiffersByAWeightyRow(const SpanResult& changed) const {
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

std::optional<SpanResult> FaultySpan::WithWrongEdge(std::mt19937_64* random) const {
  std::vector<Span> spans;
  for (int32_t by : {-1, 1}) {
    for (int32_t Mask::*edge : {&Mask::left, &Mask::right}) {
      if (span_.mask.*edge == Mask::kUnbounded) continue;
      spans.push_back(span_);
      spans.back().mask.*edge += by;
    }
  }
  std::shuffle(spans.begin(), spans.end(), *random);
  for (const Span& span : spans) {
    SpanResult changed = ExpectedOf(g_, span, {}).exact;
    if (DiffersByAWeightyRow(changed)) return changed;
  }
  return {};
}

std::optional<SpanResult> FaultySpan::WithWrongKvHead() const {
  if (g_.num_kv_heads < 2) return {};
  Span span = span_;
  const int64_t last = (g_.num_kv_heads - 1) * span.kv.head_stride;
  span.kv.key += last;
  span.kv.value += last;
  span.kv.head_stride *= -1;
  return ExpectedOf(g_, span, {}).exact;
}

std::optional<SpanResult> FaultySpan::WithoutEnd(std::mt19937_64* random) const {
  const int32_t row = span_.query_rows - 1, end = Visible(row).end;
  const std::vector<double> weights = Weights(row, Below(g_.num_heads, random));
  const size_t count = std::min(kEndRows, weights.size());
  double lost = 0;
  for (size_t n = 0; n < count; ++n) lost += weights[weights.size() - 1 - n];
  if (weights.empty() || lost < LeastWeight(weights, kWeighty)) return {};
  return Without({end - static_cast<int32_t>(count), end}, false);
}

SpanResult FaultySpan::Without(KvRange lost, bool only_values) const {
  SpanResult result = exact_;
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    const KvRange visible = Visible(i);
    const KvRange range = {std::max(lost.begin, visible.begin), std::min(lost.end, visible.end)};
    if (range.begin >= range.end) continue;
    for (int32_t h = 0; h < g_.num_heads; ++h) Remove(i, h, range, visible, only_values, &result);
  }
  return result;
}

void FaultySpan::Remove(int32_t row, int32_t head, KvRange lost, KvRange visible, bool only_values,
                        SpanResult* result) const {
  double* const output = result->output.data() + Index(row, head) * g_.head_dim;
  double& lse = result->lse[Index(row, head)];
  std::vector<double> weighted(g_.head_dim, 0);
  const double sum = Sum(row, head, lost, lse, &weighted);
  if (only_values || sum < 0.999) {
    const double left = only_values ? 1 : 1 - sum;
    for (int32_t d = 0; d < g_.head_dim; ++d) output[d] = (output[d] - weighted[d]) / left;
    lse += std::log(left);
    return;
  }
  // Nearly all the weight is lost: add up what is left.
  const std::vector<double> query = DecodedQuery(g_, span_, row, head);
  double base = kNothing;
  for (int32_t j = visible.begin; j < visible.end; ++j) {
    if (j < lost.begin || j >= lost.end) base = std::max(base, Score(query, head, j));
  }
  std::fill(weighted.begin(), weighted.end(), 0.0);
  const double left = Sum(row, head, {visible.begin, lost.begin}, base, &weighted) +
                      Sum(row, head, {lost.end, visible.end}, base, &weighted);
  for (int32_t d = 0; d < g_.head_dim; ++d) output[d] = left == 0 ? 0 : weighted[d] / left;
  lse = left == 0 ? kNothing : base + std::log(left);
}

std::optional<SpanResult> FaultySpan::Swapped(int32_t row, int32_t head, int32_t other_row,
                                              int32_t other_head) const {
  SpanResult result = exact_;
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
