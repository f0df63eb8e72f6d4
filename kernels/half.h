// Conversions between float and the two 16-bit element types, bit for bit as in IEEE 754 and
// hardware: round to nearest even, overflow to infinity, keep subnormals, NaN stays NaN (quiet,
// with sign and upper payload bits). Scalar and portable, for the oracle, tests and clients.
// Kernels have vector versions.
#ifndef FLASHCORE_KERNELS_HALF_H_
#define FLASHCORE_KERNELS_HALF_H_

#include <cstdint>
#include <cstring>

#include "kernels/attention.h"

namespace flashcore::kernels {

inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float BitsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// 1.5 * 2^23. A number of magnitude below 2^22 is rounded to an integer when this is added to it:
// the integer is then in the low bits.
inline constexpr float kIntegerBase = 12582912;

// IEEE binary16: sign, 5 bits of exponent (bias 15), 10 of mantissa.
inline float Float16ToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return BitsFloat(sign | FloatBits(magnitude));
  }
  if (exponent == 31) {  // infinity or NaN
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return BitsFloat(sign | 0x7f800000u | quiet | mantissa << 13);
  }
  return BitsFloat(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

inline uint16_t FloatToFloat16(float value) {
  const uint32_t bits = FloatBits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  }
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 2^16
  if (magnitude < 0x38800000u) {  // < 2^-14: subnormal, in units of 2^-24
    // Adding 0.5 leaves the rounded count of units in the low mantissa bits.
    const uint32_t units = FloatBits(BitsFloat(magnitude) + 0.5f) - FloatBits(0.5f);
    return static_cast<uint16_t>(sign | units);
  }
  const uint32_t odd = magnitude >> 13 & 1u;
  magnitude += 0xfffu + odd;  // a carry into the exponent is right, up to infinity
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23)) >> 13));
}

// bfloat16: the upper half of a float.
inline float BFloat16ToFloat(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BitsFloat(is_nan ? bits | 0x400000u : bits);
}

inline uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  const uint32_t odd = bits >> 16 & 1u;
  return static_cast<uint16_t>((bits + 0x7fffu + odd) >> 16);
}

inline float ToFloat(DType dtype, uint16_t element) {
  return dtype == DType::kFloat16 ? Float16ToFloat(element) : BFloat16ToFloat(element);
}

inline uint16_t FromFloat(DType dtype, float value) {
  return dtype == DType::kFloat16 ? FloatToFloat16(value) : FloatToBFloat16(value);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_HALF_H_
