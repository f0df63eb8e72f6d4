// Errors of results of attention beside those of unfused attention: for a server or kernel of which
// nothing else is known. error_bound.h is tighter, for a kernel whose roundings are known.
#ifndef FLASHCORE_KERNELS_ORACLE_ERRORS_H_
#define FLASHCORE_KERNELS_ORACLE_ERRORS_H_

#include <cmath>
#include <limits>

#include "kernels/attention.h"
#include "kernels/oracle/rows.h"

namespace flashcore::kernels {

// Absolute difference; 0 for equal infinities; infinite for NaN or if only one side is finite.
inline double Difference(double value, double reference) {
  if (value == reference) return 0;
  const double difference = std::abs(value - reference);
  return std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity();
}

// Errors against float64: the largest absolute error, and the root of the mean square (RMS). An
// error is infinite where only one of result and reference is finite (the LSE of a row that sees
// nothing is -infinity).
struct Errors {
  double result = 0;  // of O
  double result_rms = 0;
  double unfused = 0;  // of the O of unfused attention at the same precision
  double unfused_rms = 0;
  double result_lse = 0;  // of the LSE; 0 if not requested
  double unfused_lse = 0;
  double lse_floor = 1e-5;   // 1e-5 of the largest finite |LSE|, at least 1e-5
  double largest_value = 0;  // |V|
  double rounding = 0;       // of the largest |O| of the reference to the dtype, at most
  double output_rms = 0;     // of the reference
  // Bounds on what products of INT8 codes add, if the batch accepts them: see ProductErrors. 0 if
  // it does not.
  double products = 0;
  double products_rms = 0;
  double products_lse = 0;

  // The result's errors over those of unfused attention and of products; 1 if both are 0.
  double Ratio() const { return result == 0 && unfused == 0 ? 1 : result / (unfused + products); }
  double RmsRatio() const {
    return result_rms == 0 && unfused_rms == 0 ? 1 : result_rms / (unfused_rms + products_rms);
  }
  // Whether O, and LSE, are within `factor` times the errors of unfused attention, plus one
  // rounding of O: where O has few elements, the largest error of either may be lucky. The RMS
  // shows one row lost of thousands, which moves no element by more than rounding may. To all of
  // them comes what products of codes add.
  //
  // Unfused attention rounds scores, so with large scores its errors are as large as V and excuse
  // anything. Therefore O must also be within 2^-7 of the largest |V| (rounding the probabilities
  // and O to BF16 costs at most 2^-8), and LSE within 2^-7. LSE is float32; its bound is at least
  // `lse_floor`.
  bool Within(double factor) const;
  // Whether O, and LSE, are within `bound`, and the RMS error of O is within `relative` times the
  // RMS of O. The latter notices what is lost where O is small, as over many rows.
  bool WithinBound(double bound, double relative) const {
    return result <= bound && result_lse <= bound && result_rms <= relative * output_rms;
  }
};

// The errors of what is at the output and lse pointers of `batch`.
Errors Compare(const AttentionBatch& batch, Visibility* visible = VisibleByMask);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ORACLE_ERRORS_H_
