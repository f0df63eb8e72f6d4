// The first part of Config: what a kernel computes, and the types of its operands and sums.
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_TYPES_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_TYPES_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/kernel.h"

namespace flashcore::kernels::sm80 {

// Work items that a block can attend. Blocks for splits alone are 2 to 4% faster.
enum class Items : uint8_t {
  kSplits,
  kRuns,      // and splits
  kCascades,  // only
};

// Accum: type in which Q K^T and P V are summed, float or __half. KvElement: type of K and V in
// memory, Element, or __nv_fp8_e4m3 or int8_t. kRows: packed rows. Codes of E4M3 become Elements in
// registers, and those of V without kCodeValues ValueElements.
template <class Element_, int kHeadDim_, int kRows_, class Accum_, class KvElement_, Arch kArch_,
          Items kItems_, Precision kPrecision_>
struct ConfigTypes {
  using Element = Element_;
  using Accum = Accum_;
  using KvElement = KvElement_;
  static constexpr Arch kArch = kArch_;
  static constexpr Items kItems = kItems_;
  static constexpr Precision kPrecision = kPrecision_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;
  static constexpr bool kCodes = sizeof(KvElement) == 1;  // of 8 bits; each row has a scale
  // INT8 numbers that an element of Q becomes, for Q K^T with K's codes as they are: a higher and a
  // lower half, or one. 0: Q and K are multiplied as Elements.
  static constexpr int kQueryParts = !std::is_same_v<KvElement, int8_t> ? 0
                                     : kPrecision == Precision::k16Bit  ? 2
                                                                        : 1;
  // Type of P and V as they are multiplied. Codes of INT8 are exact in float16, and so is P to 11
  // bits: it is at most 2^kRescaleThreshold (score_scale.cuh).
  using ValueElement = std::conditional_t<(kQueryParts > 0), __half, Element>;
  static constexpr bool kCodeValues = kPrecision == Precision::kInt8QkPv;  // P and V, too
  // Whether the INT32 sums of P V, or of Q K^T, are floats from the start (kIntegerBase). For both
  // at head_dim 128 there are no registers.
  static constexpr bool kFloatValueSums = kCodeValues && kHeadDim > 64;
  static constexpr bool kFloatScoreSums = kQueryParts == 1 && !kFloatValueSums;
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_TYPES_CUH_
