// The launchers of the sm80 family: one instantiation per head_dim, accumulator type and K/V type,
// each in a file of its own so that they compile in parallel.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_H_
#define FLASHCORE_KERNELS_SM80_ATTEND_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// Common to every block of a launch. All pointers are device pointers.
struct AttendParams {
  // The work list, unless it follows in the parameters.
  const WorkSpan* spans;
  const WorkTile* tiles;  // each for every KV head
  int32_t num_spans;
  int32_t num_kv_heads;
  RowDivider group;   // query heads per KV head
  int32_t* finished;  // as in LaunchContext
  Partials partials;
};

// Launches the kernel for `count` tiles of spans of at most tile_rows packed rows, one of
// kCudaTileRows, on the cudaStream_t `stream`. params.spans and params.tiles are in device memory,
// or, if `in_parameters`, on the host; then they have room in kMaxListInParameters. Float16
// accumulators and E4M3 K/V need dtype float16; E4M3 needs head_dim 64 or 128. Returns 0 or the
// cudaError_t of the launch.
template <int kHeadDim, Accumulate kAccumulate = Accumulate::kFloat32,
          KvDType kKvDType = KvDType::kSameAsQuery>
int LaunchAttend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count,
                 bool in_parameters, void* stream);

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_H_
