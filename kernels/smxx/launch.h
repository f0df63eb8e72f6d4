// What all blocks of a launch over a work list have in common.
#ifndef FLASHCORE_KERNELS_SMXX_LAUNCH_H_
#define FLASHCORE_KERNELS_SMXX_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "kernels/plan.h"
#include "kernels/smxx/work_list.h"
#include "kernels/tile_config.h"

namespace flashcore::kernels {

// All pointers are device pointers, but for those of a work list that travels in the parameters.
struct LaunchParams {
  const WorkSpan* spans;
  const WorkTile* tiles;  // each for every KV head
  int32_t num_kv_heads;
  RowDivider group;   // query heads per KV head
  int32_t* finished;  // as in LaunchContext
  Partials partials;
};

// The tiles that a kernel is launched for.
struct LaunchTiles {
  LaunchParams params;
  int32_t count;      // of params.tiles, at least 1
  int32_t members;    // records that follow the tiles; 0 but for cascade items
  int32_t most_rows;  // packed rows of the largest
  size_t head_bytes;  // of params.spans and what follows them up to the first tiles of the list
  bool has_runs;
  bool in_parameters;  // spans and tiles are on the host, and have room in kMaxListInParameters
  SharedSize shared;   // of the device
  void* stream;        // a cudaStream_t

  size_t tile_bytes() const { return (size_t{1} * count + members) * sizeof(WorkTile); }
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_SMXX_LAUNCH_H_
