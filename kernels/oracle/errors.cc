#include "kernels/oracle/errors.h"

#include <algorithm>

#include "kernels/oracle/product_errors.h"
#include "kernels/oracle/reference.h"

namespace flashcore::kernels {
namespace {

constexpr double kErrorLimit = 0x1p-7;  // of O, divided by the largest |V|; of LSE

// Adds up the errors of a batch.
class Comparison {
 public:
  explicit Comparison(const Geometry& geometry) : g_(geometry) {}

  void Add(const Span& span, const QueryRow& row) {
    const RowAttention<double> reference = AttendExactly(row);
    const RowAttention<float> unfused = AttendUnfused(row, g_.dtype);
    errors_.largest_value = std::max(errors_.largest_value, double{row.kv.largest_value()});
    const ProductErrors products = BoundProducts(g_.precision, row, reference);
    errors_.products = std::max(errors_.products, products.output);
    errors_.products_lse = std::max(errors_.products_lse, products.lse);
    product_squares_ += products.squares;
    const std::byte* const output =
        span.output + row.row * span.row_stride + row.head * span.head_stride;
    for (int32_t d = 0; d < g_.head_dim; ++d) {
      const double want = reference.output[d];
      const double error = Difference(LoadElement(g_.dtype, output, d), want);
      const double unfused_error = Difference(unfused.output[d], want);
      errors_.result = std::max(errors_.result, error);
      errors_.unfused = std::max(errors_.unfused, unfused_error);
      squares_ += error * error;
      unfused_squares_ += unfused_error * unfused_error;
      output_squares_ += want * want;
      largest_output_ = std::max(largest_output_, std::abs(want));
    }
    elements_ += g_.head_dim;
    if (span.lse != nullptr) AddLse(span, row, reference.lse, unfused.lse);
  }

  Errors Total() const {
    Errors errors = errors_;
    const auto rms = [&](double squares) { return std::sqrt(squares / std::max(1.0, elements_)); };
    errors.result_rms = rms(squares_);
    errors.unfused_rms = rms(unfused_squares_);
    errors.output_rms = rms(output_squares_);
    errors.products_rms = rms(product_squares_);
    errors.rounding = largest_output_ * UnitRoundoff(g_.dtype);
    return errors;
  }

 private:
  void AddLse(const Span& span, const QueryRow& row, double reference, double unfused) {
    const float lse = span.lse[row.row * span.lse_row_stride + row.head * span.lse_head_stride];
    errors_.result_lse = std::max(errors_.result_lse, Difference(lse, reference));
    errors_.unfused_lse = std::max(errors_.unfused_lse, Difference(unfused, reference));
    if (std::isfinite(reference)) {
      errors_.lse_floor = std::max(errors_.lse_floor, 1e-5 * std::abs(reference));
    }
  }

  const Geometry g_;
  Errors errors_;
  double squares_ = 0, unfused_squares_ = 0, output_squares_ = 0, product_squares_ = 0;
  double largest_output_ = 0;
  double elements_ = 0;
};

}  // namespace

bool Errors::Within(double factor) const {
  const double bound = std::min(factor * unfused + rounding, kErrorLimit * largest_value);
  const double lse_bound = std::min(factor * unfused_lse, kErrorLimit);
  return std::isfinite(result) && result <= bound + products &&
         result_rms <= factor * (unfused_rms + products_rms) && std::isfinite(result_lse) &&
         result_lse <= std::max(lse_bound, lse_floor) + products_lse;
}

Errors Compare(const AttentionBatch& batch, Visibility* visible) {
  Comparison comparison(batch.geometry);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const Span& span = batch.spans[s];
    ForEachQueryRow(batch.geometry, span, visible, /*query_codes=*/0,
                    [&](const QueryRow& row) { comparison.Add(span, row); });
  }
  return comparison.Total();
}

}  // namespace flashcore::kernels
