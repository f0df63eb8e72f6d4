// Compile-time configuration of one attention kernel: its types, features and shared memory.
#ifndef FLASHCORE_KERNELS_SM80_CONFIG_CUH_
#define FLASHCORE_KERNELS_SM80_CONFIG_CUH_

#include <type_traits>

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/plan_options.h"
#include "kernels/sm80/config_features.cuh"
#include "kernels/sm80/config_layout.cuh"
#include "kernels/sm80/config_types.cuh"

namespace flashcore::kernels::sm80 {

// The compile-time configuration of one attention kernel. Its parameters are those of ConfigTypes.
template <class Element_, int kHeadDim_, int kRows_, class Accum_ = float,
          class KvElement_ = Element_, Arch kArch_ = Arch::kLargeShared,
          Items kItems_ = Items::kSplits, Precision kPrecision_ = Precision::k16Bit>
struct Config
    : ConfigLayout<ConfigFeatures<ConfigTypes<Element_, kHeadDim_, kRows_, Accum_, KvElement_,
                                              kArch_, kItems_, kPrecision_>>> {
  using C = typename Config::ConfigLayout;
  static_assert(C::kHeadDim % 32 == 0 && C::kHeadDim <= 256);
  static_assert(std::is_same_v<typename C::KvElement, typename C::Element> || C::kCodes);
  static_assert(!C::kCodes ||
                (std::is_same_v<typename C::Accum, float> && C::kScaleBytes % 128 == 0));
  static_assert(C::kKvRowBytes % 64 == 0 && C::kSliceColumns % (8 * C::kStepMmas) == 0);
  static_assert(!C::kTransposed || (C::kCodes && C::kRowTiles == 1 && C::kWarpGroups > 2));
  static_assert(C::kRowWarps * C::kWarpRows == C::kRows);
  static_assert(kPageTokens % C::kTileTokens == 0 &&
                C::kTileTokens % (C::kCodeValues ? 32 : 16) == 0);
  static_assert(!C::kCodeValues || C::kQueryParts == 1);
  static_assert(!C::kFloatValueSums || C::kPhases == 1);
  static_assert(!C::kPacksQuery || (C::kBuffers == 1 && C::kWarpGroups == 1 &&
                                    C::kStagesOffset >= C::kRows * C::kQueryOperandBytes));
  static_assert(C::kPhases == C::kWarpGroups ||
                (C::kPhases == 2 && C::kWarpGroups == 1 && C::kSingleBuffers));
  static_assert((C::kPhases & (C::kPhases - 1)) == 0 && C::kOutputTiles % C::kWarpGroups == 0);
  static_assert(!C::kRuns || C::kSingleBuffers);
  static_assert(!C::kRuns || C::kWarpGroups == (C::kAddsPhases ? kSmallRunSplits : 1));
  static_assert(C::kSharedBytes <= 99 * 1024, "limit of a block on sm_89");
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_CONFIG_CUH_
