// INT8 K/V: how a row of one KV head is stored, its largest magnitude m being
//
//   scale = m / 127, rounded up to BFloat16
//   code  = element / scale, rounded to the nearest integer, ties to even; in [-127, 127]
//
// and an element is read as scale * code: at most half a scale from what it was (and
// 2^-17 of a scale: the division rounds). A row is stored on its own, so its bytes depend on
// nothing but the row. BFloat16 has the range of both 16-bit types, and a scale that is up to 1/128
// too large costs less than 0.8% of the precision.
//
// A row of zeros has scale 0. A row with NaN or infinity has scale NaN and is NaN as a whole: what
// attends to it is NaN.
#ifndef FLASHCORE_KERNELS_INT8_H_
#define FLASHCORE_KERNELS_INT8_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/half.h"

namespace flashcore::kernels {

inline constexpr float kInt8Max = 127;

// The scale of a row, as the bits of a BFloat16. `largest` are the bits of its largest magnitude in
// the 16-bit type `dtype`: the largest of its elements without their signs, also as integers.
inline uint16_t Int8Scale(DType dtype, uint16_t largest) {
  const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
  if (largest >= infinity) return 0x7fc0;  // NaN
  return static_cast<uint16_t>((FloatBits(ToFloat(dtype, largest) / kInt8Max) + 0xffffu) >> 16);
}

// The code of an element of a row with this scale. 0 if the scale is 0 or NaN.
inline int8_t Int8Code(float element, float scale) {
  if (!(scale > 0)) return 0;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  constexpr float kMagic = 12582912.0f;
  return static_cast<int8_t>(FloatBits(element / scale + kMagic) - FloatBits(kMagic));
}

// Writes the codes of a row of `head_dim` elements, and returns its scale as the bits of a
// BFloat16.
inline uint16_t QuantiseToInt8(DType dtype, const std::byte* row, int32_t head_dim,
                               std::byte* codes) {
  const auto element = [row](int32_t d) {
    uint16_t bits;
    std::memcpy(&bits, row + d * sizeof(bits), sizeof(bits));
    return bits;
  };
  uint16_t largest = 0;
  for (int32_t d = 0; d < head_dim; ++d) {
    largest = std::max(largest, static_cast<uint16_t>(element(d) & 0x7fffu));
  }
  const uint16_t scale_bits = Int8Scale(dtype, largest);
  const float scale = BFloat16ToFloat(scale_bits);
  for (int32_t d = 0; d < head_dim; ++d) {
    codes[d] = static_cast<std::byte>(Int8Code(ToFloat(dtype, element(d)), scale));
  }
  return scale_bits;
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_INT8_H_
