#include "tests/kernels/kernel_rounding.h"

namespace flashcore::kernels {

Rounding RoundingOf(KernelSpec spec, const PlanOptions& options, const Geometry& geometry,
                    const Span& span) {
  constexpr double kFloat32 = 0x1p-24;
  spec.precision = PrecisionFor(geometry, span.query_rows);
  Rounding rounding;
  rounding.output = UnitRoundoff(spec.dtype);
  rounding.probability = 4 * kFloat32;  // the exponential
  rounding.sums = 2 * kFloat32;
  if (spec.arch != Arch::kCpu && spec.precision != Precision::kInt8QkPv) {
    const DType dtype = spec.kv_dtype == KvDType::kInt8 ? DType::kFloat16 : spec.dtype;
    rounding.probability_dtype = dtype;
    rounding.probability += UnitRoundoff(dtype);
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
    rounding.tile_weight = 0.5 / kLargestProbabilityCode;
  }
  if (spec.accumulate == Accumulate::kFloat16) {
    rounding.sums = 0x1p-11;
    rounding.step = 8;
  }
  rounding.split_rows = SplitRows(geometry, span, options, kManyWorkers);
  return rounding;
}

}  // namespace flashcore::kernels
