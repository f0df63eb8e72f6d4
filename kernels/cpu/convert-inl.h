// Vector conversions between stored elements and float32, and the transposed K tile. Included once
// per SIMD target. Results equal kernels/half.h bit for bit, except NaN payloads.
#if defined(FLASHCORE_KERNELS_CPU_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHCORE_KERNELS_CPU_CONVERT_INL_H_
#undef FLASHCORE_KERNELS_CPU_CONVERT_INL_H_
#else
#define FLASHCORE_KERNELS_CPU_CONVERT_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/attention.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using VecF = hn::Vec<FloatTag>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));

// Whether Highway converts float16 in hardware. Its emulation loses infinity and NaN.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
constexpr bool kHardwareFloat16 = true;
#else
constexpr bool kHardwareFloat16 = false;
#endif

template <class D, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> Float16BitsToFloat(D d, VU half) {
  const hn::RebindToUnsigned<D> du;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7fffu)));
  // As float bits, the exponent is 112 too small. The product is exact, also for subnormals.
  auto bits = hn::BitCast(du, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f)));
  const hn::RebindToSigned<D> di;
  const auto special = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, (0x7c00 << 13) - 1));
  const auto infinity = hn::Set(du, 0x7f800000u);
  bits = hn::Or(bits, hn::IfThenElseZero(hn::RebindMask(du, special), infinity));
  return hn::BitCast(d, hn::Or(bits, sign));
}

template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> FloatToFloat16Bits(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;  // magnitudes are compared as non-negative signed integers
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto signed_magnitude = hn::BitCast(di, magnitude);

  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xfffu)), odd);
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
  // Adding 0.5 leaves the rounded count of units of 2^-24 in the low mantissa bits.
  const auto half = hn::Set(d, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));

  const auto is_nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7f800000));
  const auto is_large = hn::Gt(signed_magnitude, hn::Set(di, 0x477fffff));
  const auto is_small = hn::Lt(signed_magnitude, hn::Set(di, 0x38800000));
  auto result = hn::IfThenElse(hn::RebindMask(du, is_small), subnormal, normal);
  result = hn::IfThenElse(hn::RebindMask(du, is_large), hn::Set(du, 0x7c00u), result);
  result = hn::IfThenElse(hn::RebindMask(du, is_nan), hn::Set(du, 0x7e00u), result);
  return hn::Or(result, sign);
}

template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> FloatToBFloat16Bits(D, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto is_nan = hn::RebindMask(du, hn::Ne(value, value));
  return hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
}

// The elements of K and V: the query's dtype, or codes of 8 bits without their row's scale.
enum class Element { kFloat16, kBFloat16, kFloat8E4M3, kInt8 };

constexpr Element ElementOf(DType dtype) {
  return dtype == DType::kFloat16 ? Element::kFloat16 : Element::kBFloat16;
}
constexpr bool IsCode(Element element) {
  return element == Element::kFloat8E4M3 || element == Element::kInt8;
}
constexpr int ElementBytes(Element element) { return IsCode(element) ? 1 : 2; }

// The factor of a loaded element, to be multiplied by the scale of its row. As float16, whose
// exponent bias is 15 instead of 7, an E4M3 code has 2^-8 of its value, subnormals included.
constexpr float UnitOf(Element element) { return element == Element::kFloat8E4M3 ? 256 : 1; }

// kLanes elements from `from`, which need not be aligned, divided by UnitOf(kElement).
template <Element kElement, class D>
HWY_INLINE hn::Vec<D> LoadElements(D d, const std::byte* from) {
  if constexpr (kElement == Element::kInt8) {
    const hn::Rebind<int8_t, D> d8;
    const hn::RebindToSigned<D> di;
    const auto codes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(from));
    return hn::ConvertTo(d, hn::PromoteTo(di, codes));
  } else if constexpr (kElement == Element::kFloat8E4M3) {
    const hn::Rebind<int8_t, D> d8;
    const hn::Rebind<int16_t, D> d16;
    const auto codes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(from));
    // The sign is in the two upper bits, of which one stays.
    const auto half = hn::And(hn::ShiftLeft<7>(hn::PromoteTo(d16, codes)),
                              hn::Set(d16, static_cast<int16_t>(0xbfff)));
    if constexpr (kHardwareFloat16) {
      return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
    } else {
      const hn::RebindToUnsigned<D> du;
      const auto bits = hn::PromoteTo(du, hn::BitCast(hn::Rebind<uint16_t, D>(), half));
      return Float16BitsToFloat(d, bits);
    }
  } else if constexpr (kElement == Element::kFloat16 && kHardwareFloat16) {
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
    if constexpr (kElement == Element::kFloat16) return Float16BitsToFloat(d, bits);
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
}

template <DType kType, class D>
HWY_INLINE void StoreElements(D d, hn::Vec<D> value, uint16_t* to) {
  if constexpr (kType == DType::kFloat16 && kHardwareFloat16) {
    const hn::Rebind<hwy::float16_t, D> dh;
    hn::StoreU(hn::DemoteTo(dh, value), dh, reinterpret_cast<hwy::float16_t*>(to));
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToSigned<D> di;  // the demotion saturates signed to unsigned: 16 bits all fit
    if constexpr (kType == DType::kFloat16) {
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, FloatToFloat16Bits(d, value))), d16, to);
    } else {
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, FloatToBFloat16Bits(d, value))), d16, to);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR
template <class D, class V = hn::Vec<D>>
HWY_INLINE void TransposeSquare(D, V*) {}  // 1 x 1
#else
// Transposes 4 x 4 floats within each 128-bit block: lane i of block b of v[k] becomes lane k of
// block b of v[i].
template <class D, class V = hn::Vec<D>>
HWY_INLINE void TransposeInBlocks(D d, V* v) {
  const hn::RepartitionToWide<D> dw;
  const auto low01 = hn::BitCast(dw, hn::InterleaveLower(d, v[0], v[1]));
  const auto low23 = hn::BitCast(dw, hn::InterleaveLower(d, v[2], v[3]));
  const auto high01 = hn::BitCast(dw, hn::InterleaveUpper(d, v[0], v[1]));
  const auto high23 = hn::BitCast(dw, hn::InterleaveUpper(d, v[2], v[3]));
  v[0] = hn::BitCast(d, hn::InterleaveLower(dw, low01, low23));
  v[1] = hn::BitCast(d, hn::InterleaveUpper(dw, low01, low23));
  v[2] = hn::BitCast(d, hn::InterleaveLower(dw, high01, high23));
  v[3] = hn::BitCast(d, hn::InterleaveUpper(dw, high01, high23));
}

// Transposes kLanes x kLanes floats: lane i of v[k] becomes lane k of v[i].
template <class D, class V = hn::Vec<D>>
HWY_INLINE void TransposeSquare(D d, V* v) {
  for (int i = 0; i < kLanes; i += 4) TransposeInBlocks(d, v + i);
  // Block b of v[4g + e] now holds rows 4g..4g+3 of column 4b + e: transpose the blocks over g.
  if constexpr (kLanes == 8) {
    for (int e = 0; e < 4; ++e) {
      const V a = v[e], b = v[4 + e];
      v[e] = hn::ConcatLowerLower(d, b, a);
      v[4 + e] = hn::ConcatUpperUpper(d, b, a);
    }
  } else if constexpr (kLanes == 16) {
    for (int e = 0; e < 4; ++e) {
      const V low02 = hn::ConcatLowerLower(d, v[8 + e], v[e]);
      const V low13 = hn::ConcatLowerLower(d, v[12 + e], v[4 + e]);
      const V high02 = hn::ConcatUpperUpper(d, v[8 + e], v[e]);
      const V high13 = hn::ConcatUpperUpper(d, v[12 + e], v[4 + e]);
      v[e] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(low13), low02);
      v[4 + e] = hn::OddEvenBlocks(low13, hn::SwapAdjacentBlocks(low02));
      v[8 + e] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(high13), high02);
      v[12 + e] = hn::OddEvenBlocks(high13, hn::SwapAdjacentBlocks(high02));
    }
  }
}

#endif  // HWY_TARGET

// Writes the K rows of one tile, rows[kPageTokens] of head_dim elements, to key[head_dim][64].
template <Element kElement>
HWY_INLINE void TransposeKeys(const std::byte* const* rows, int head_dim, float* HWY_RESTRICT key) {
  const FloatTag d;
  constexpr int kBytes = ElementBytes(kElement);
  for (int j = 0; j < kPageTokens; j += kLanes) {
    for (int c = 0; c < head_dim; c += kLanes) {
      VecF v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = LoadElements<kElement>(d, rows[j + i] + c * kBytes);
      TransposeSquare(d, v);
      for (int i = 0; i < kLanes; ++i) hn::Store(v[i], d, key + (c + i) * kPageTokens + j);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
