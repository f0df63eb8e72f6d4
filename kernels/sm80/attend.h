// The seam inside the sm80 family: one function per head_dim, type of sums and type of K/V, each in
// a file of its own so that they compile side by side.
#ifndef FLASHCORE_KERNELS_SM80_ATTEND_H_
#define FLASHCORE_KERNELS_SM80_ATTEND_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels::sm80 {

// What every block of a launch reads; all pointers are device pointers.
struct AttendParams {
  const WorkTile* work;  // one per block and KV head
  int32_t* finished;     // as in WorkListView
  Partials partials;
  RowDivider group;  // query heads per KV head
  int32_t num_kv_heads;
};

// Attends `count` pieces of work whose rows fit tile_rows, one of kCudaTileRows. `stream` is a
// cudaStream_t. Returns 0 or the cudaError_t of the launch.
template <int kHeadDim>
int Attend(DType dtype, int32_t tile_rows, const AttendParams& params, int32_t count, void* stream);

// The same for float16, with float16 sums.
template <int kHeadDim>
int AttendFloat16(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream);

// The same for float16 Q and O, and E4M3 K and V: head_dim 64 and 128.
template <int kHeadDim>
int AttendFp8(int32_t tile_rows, const AttendParams& params, int32_t count, void* stream);

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_ATTEND_H_
