// Conversions between float and FP8 E4M3 (OCP E4M3FN: sign, 4 bits of exponent with bias 7, 3 bits
// of mantissa), bit for bit as the saturating hardware conversions: round to nearest even;
// magnitudes above 448, infinity included, become 448; keep subnormals (the smallest is 2^-9).
// There is no infinity. 0x7f and 0xff are NaN. NaN stays NaN and keeps its sign; hardware always
// returns a positive NaN. Scalar and portable, as in kernels/half.h.
#ifndef FLASHCORE_KERNELS_FP8_H_
#define FLASHCORE_KERNELS_FP8_H_

#include <algorithm>
#include <cstdint>

#include "kernels/half.h"

namespace flashcore::kernels {

inline constexpr float kE4M3Max = 448;

inline float E4M3ToFloat(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return BitsFloat(sign | 0x7fc00000u);
  // With float's exponent bias (127, not 7) the bits mean 2^-120 of the value, also for subnormals.
  return BitsFloat(sign | magnitude << 20) * 0x1p120f;
}

inline uint8_t FloatToE4M3(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = std::min(bits & 0x7fffffffu, FloatBits(kE4M3Max));
  // Subnormal, in units of 2^-9: adding 2^14 leaves their rounded count in the low mantissa bits.
  const uint32_t units = FloatBits(BitsFloat(magnitude) + 0x1p14f) - FloatBits(0x1p14f);
  const uint32_t odd = magnitude >> 20 & 1u;
  const uint32_t rounded = magnitude + 0x7ffffu + odd;  // a carry into the exponent is right
  const uint32_t code = magnitude < FloatBits(0x1p-6f) ? units : (rounded - (120u << 23)) >> 20;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint8_t>(sign | (is_nan ? 0x7fu : code));  // no branch: loops are vectorised
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_FP8_H_
