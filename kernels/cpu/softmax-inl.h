// Online softmax over one score tile. Included once per SIMD target.
#if defined(FLASHCORE_KERNELS_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHCORE_KERNELS_CPU_SOFTMAX_INL_H_
#undef FLASHCORE_KERNELS_CPU_SOFTMAX_INL_H_
#else
#define FLASHCORE_KERNELS_CPU_SOFTMAX_INL_H_
#endif

#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/cpu/multiply-inl.h"
#include "kernels/half.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

// 2^x for x <= 0, to about 1 unit in the last place; 0 below 2^-126, NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V base = hn::Set(d, kIntegerBase);
  const V shifted = hn::Add(x, base);
  const V fraction = hn::Sub(x, hn::Sub(shifted, base));  // in [-0.5, 0.5]
  V p = hn::Set(d, 1.535336188319500e-4f);
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.339887440266574e-3f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 9.618437357674640e-3f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 5.550332471162809e-2f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 2.402264791363012e-1f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 6.931472028550421e-1f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::BitCast(di, shifted), hn::Set(di, 127));
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  const V result = hn::Mul(p, power);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), result);
}

// Turns the scores of one packed row into probabilities relative to the new maximum, and updates
// the row's running maximum, sum and rescale. kMasked: scores outside `visible` count as -infinity,
// whatever they hold (NaN included).
template <bool kMasked>
HWY_INLINE void SoftmaxRow(int r, TokenRange visible, Scratch* scratch) {
  const FloatTag d;
  constexpr int kVectors = kPageTokens / kLanes;
  float* scores = scratch->scores + r * kPageTokens;
  VecF s[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    s[v] = hn::Load(d, scores + v * kLanes);
    if constexpr (kMasked) {
      const VecF token = hn::Iota(d, static_cast<float>(v * kLanes));
      const auto is_visible = hn::And(hn::Ge(token, hn::Set(d, static_cast<float>(visible.begin))),
                                      hn::Lt(token, hn::Set(d, static_cast<float>(visible.end))));
      s[v] = hn::IfThenElse(is_visible, s[v], hn::Set(d, kNoScore));
    }
  }
  VecF largest = s[0];
  for (int v = 1; v < kVectors; ++v) largest = hn::Max(largest, s[v]);
  const float old_max = scratch->max[r];
  const VecF max = hn::Max(hn::MaxOfLanes(d, largest), hn::Set(d, old_max));
  // While no token has been visible, the base is 0 instead of -infinity: 2^(-infinity - 0) = 0.
  const VecF base = hn::IfThenZeroElse(hn::Eq(max, hn::Set(d, kNoScore)), max);
  const VecF rescale = Exp2(d, hn::Sub(hn::Set(d, old_max), base));
  VecF sum = hn::Mul(hn::Load(d, scratch->sum + r * kMaxLanes), rescale);
  for (int v = 0; v < kVectors; ++v) {
    s[v] = Exp2(d, hn::Sub(s[v], base));
    hn::Store(s[v], d, scores + v * kLanes);
    sum = hn::Add(sum, s[v]);
  }
  hn::Store(sum, d, scratch->sum + r * kMaxLanes);
  scratch->max[r] = hn::GetLane(max);
  scratch->rescale[r] = hn::GetLane(rescale);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
