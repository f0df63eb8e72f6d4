// Launches the kernels of a family over a work list.
#ifndef FLASHCORE_KERNELS_CUDA_LAUNCH_H_
#define FLASHCORE_KERNELS_CUDA_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cuda/work_list.h"
#include "kernels/kernel.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Parameters that all blocks of a launch share. All pointers are device pointers, but for those of
// a work list that travels in the parameters.
struct LaunchParams {
  const WorkSpan* spans;
  const WorkTile* tiles;  // each for every KV head
  int32_t num_kv_heads;
  RowDivider group;   // query heads per KV head
  int32_t* finished;  // as in CudaResources
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
  void* stream;        // a cudaStream_t

  size_t tile_bytes() const { return (size_t{1} * count + members) * sizeof(WorkTile); }
};

// Launches one kernel. Returns 0 or the cudaError_t of the launch.
using TilesLauncher = int(const LaunchTiles& tiles);

// The kernels of a row of the registry.
struct CudaKernels {
  TilesLauncher* tiles[kTileKinds];  // of up to PlanCosts::tiles[kind] packed rows
  TilesLauncher* cascades;
};

// The Launcher of a row with these kernels. Launches one for each tile size in the plan, side by
// side: one for a batch of decodes, at most five.
int LaunchAttention(const CudaKernels& kernels, const AttentionBatch& batch, const Plan& plan,
                    const LaunchContext& ctx);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_LAUNCH_H_
