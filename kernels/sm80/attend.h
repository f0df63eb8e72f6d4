// The launchers of the sm80 family: one instantiation per head_dim, accumulator type and K/V type,
// each in a file of its own so that they compile in parallel.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_H_
#define FLASHCORE_KERNELS_SM80_ATTEND_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/launch.h"

namespace flashcore::kernels::sm80 {

// Launches the kernel for tiles of spans of at most tile_rows packed rows, one of kCudaTileRows, or
// for cascade items, if the tiles have members.
// Float16 accumulators and E4M3 K/V need dtype float16; E4M3 needs head_dim 64 or 128. Returns 0 or
// the cudaError_t of the launch.
template <int kHeadDim, Accumulate kAccumulate = Accumulate::kFloat32,
          KvDType kKvDType = KvDType::kSameAsQuery>
int LaunchAttend(DType dtype, int32_t tile_rows, const LaunchTiles& tiles);

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_H_
