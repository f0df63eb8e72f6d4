// 8-bit K/V, INT8 or E4M3: how a row of one KV head is stored. Its largest magnitude being m,
//
//   scale = m / 127 (INT8) or m / 448 (E4M3), rounded up to BFloat16
//   code  = element / scale, rounded to the nearest integer (INT8) or E4M3 (fp8.h), ties to even,
//           at most 127 or 448
//
// and an element is read as scale * code. INT8 is at most half a scale from what the element was
// (and 2^-17 of a scale: the division rounds); E4M3 at most 1/16 of the element, or 2^-10 of a
// scale. A row is stored on its own, so its bytes depend on nothing but the row. BFloat16 has the
// range of both 16-bit types, and a scale that is up to 1/128 too large costs less than 0.8% of the
// precision.
//
// Finite elements are read as finite: no scale is above the largest magnitude of the row's type /
// 127 or / 448, rounded down. So elements within 1/128 of that magnitude, for FP16 above 65024
// (INT8) or 65408 (E4M3), are read as less, by at most 1/128.
//
// A row of zeros has scale 0. A row with NaN or infinity has scale NaN and is NaN as a whole: what
// attends to it is NaN. The codes of both are 0.
#ifndef FLASHCORE_KERNELS_KV_8BIT_H_
#define FLASHCORE_KERNELS_KV_8BIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/fp8.h"
#include "kernels/half.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {

// The largest code of an 8-bit type, as a number.
inline constexpr float LargestCode(KvDType kv_dtype) {
  return kv_dtype == KvDType::kInt8 ? 127 : kE4M3Max;
}

// The scale of a row, as the bits of a BFloat16. `largest` are the bits of its largest magnitude in
// the 16-bit type `dtype`: the largest of its elements without their signs, also as integers.
inline uint16_t ScaleOfRow(KvDType kv_dtype, DType dtype, uint16_t largest) {
  const uint16_t infinity = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
  if (largest >= infinity) return 0x7fc0;  // NaN
  const float scale = ToFloat(dtype, largest) / LargestCode(kv_dtype);
  const float most = ToFloat(dtype, infinity - 1) / LargestCode(kv_dtype);
  return static_cast<uint16_t>(std::min((FloatBits(scale) + 0xffffu) >> 16, FloatBits(most) >> 16));
}

// The code of an element of a row with this scale. 0 if the scale is 0 or NaN.
template <KvDType kKvDType>
std::byte CodeOf(float element, float scale) {
  if (!(scale > 0)) return std::byte{0};
  if constexpr (kKvDType == KvDType::kFloat8E4M3) return std::byte{FloatToE4M3(element / scale)};
  const float ratio = std::clamp(element / scale, -127.0f, 127.0f);
  return static_cast<std::byte>(FloatBits(ratio + kIntegerBase));
}

// The number that a code stands for, to be multiplied by the scale of its row.
inline float CodeToFloat(KvDType kv_dtype, std::byte code) {
  if (kv_dtype == KvDType::kInt8) return std::to_integer<int8_t>(code);
  return E4M3ToFloat(std::to_integer<uint8_t>(code));
}

// Writes the codes of a row of `head_dim` elements, and returns its scale as the bits of a
// BFloat16.
template <KvDType kKvDType>
uint16_t QuantiseRow(DType dtype, const std::byte* row, int32_t head_dim, std::byte* codes) {
  const auto element = [row](int32_t d) {
    uint16_t bits;
    std::memcpy(&bits, row + d * sizeof(bits), sizeof(bits));
    return bits;
  };
  uint16_t largest = 0;
  for (int32_t d = 0; d < head_dim; ++d) {
    largest = std::max(largest, static_cast<uint16_t>(element(d) & 0x7fffu));
  }
  const uint16_t scale_bits = ScaleOfRow(kKvDType, dtype, largest);
  const float scale = BFloat16ToFloat(scale_bits);
  for (int32_t d = 0; d < head_dim; ++d) {
    codes[d] = CodeOf<kKvDType>(ToFloat(dtype, element(d)), scale);
  }
  return scale_bits;
}

// Writes the codes and the scale of row `row` of KV head `head` to a page of 8-bit K/V. `page` is
// where K, or V, of the page begins; `from` has head_dim elements of layout.dtype.
inline void Store8BitRow(const PageLayout& layout, const std::byte* from, int32_t head, int32_t row,
                         std::byte* page) {
  const auto quantise = layout.kv_dtype == KvDType::kInt8 ? QuantiseRow<KvDType::kInt8>
                                                          : QuantiseRow<KvDType::kFloat8E4M3>;
  const uint16_t scale = quantise(layout.dtype, from, layout.head_dim,
                                  page + head * layout.head_bytes() + row * layout.row_bytes());
  std::memcpy(page + layout.scales_offset(head) + row * sizeof(scale), &scale, sizeof(scale));
}

// The scale of a row of 8-bit K/V. `tensor` is kv.key or kv.value.
inline float RowScale(const KvView& kv, const std::byte* tensor, int32_t kv_head, int32_t row) {
  const std::byte* const head =
      tensor + kv.pages[row / kPageTokens] * kv.page_stride + kv_head * kv.head_stride;
  uint16_t bits;
  std::memcpy(&bits, head + kPageTokens * kv.row_stride + row % kPageTokens * sizeof(bits),
              sizeof(bits));
  return BFloat16ToFloat(bits);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_KV_8BIT_H_
