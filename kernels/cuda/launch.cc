#include "kernels/cuda/launch.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/branches.h"
#include "kernels/cuda/combine.h"
#include "kernels/cuda/work_list.h"

namespace flashcore::kernels {

int LaunchAttention(const CudaKernels& kernels, const AttentionBatch& batch, const Plan& plan,
                    const LaunchContext& ctx) {
  const Geometry& geometry = batch.geometry;
  alignas(kWorkListAlignment) thread_local std::byte list[kMaxListInParameters];
  const WorkListLayout layout(batch, plan);
  const bool in_parameters = layout.BytesInMemory() == 0;
  if (in_parameters) PackWorkList(batch, plan, layout, list);
  void* const work_list = in_parameters ? list : ctx.cuda.work_list;
  const Partials partials(static_cast<float*>(ctx.workspace), plan.partial_rows, geometry.head_dim);
  auto* const stream = static_cast<cudaStream_t>(ctx.cuda.stream);
  const auto tiles_of = [&](const WorkListLayout::TileArray& array, cudaStream_t on) {
    const LaunchParams params{static_cast<const WorkSpan*>(work_list),
                              array.In(work_list),
                              geometry.num_kv_heads,
                              RowDivider(geometry.group()),
                              ctx.cuda.finished,
                              partials};
    return LaunchTiles{params,
                       array.count,
                       array.members,
                       array.most_rows,
                       layout.head_bytes,
                       array.has_runs,
                       in_parameters,
                       on};
  };
  // Each kind runs beside the others: decodes wait for memory while a prefill multiplies, and small
  // tiles fill the last round of large ones. Largest tiles first, because they take longest, and
  // cascade items before the other splits of their spans.
  struct Launch {
    TilesLauncher* kernel;
    const WorkListLayout::TileArray* tiles;
  };
  Launch launches[kTileKinds + 1];
  int num_launches = 0;
  const auto add = [&](TilesLauncher* kernel, const WorkListLayout::TileArray& tiles) {
    if (tiles.count > 0) launches[num_launches++] = {kernel, &tiles};
  };
  for (int kind = kTileKinds - 1; kind > 0; --kind) {
    add(kernels.tiles[kind], layout.kinds[kind]);
  }
  add(kernels.cascades, layout.cascades);
  add(kernels.tiles[0], layout.kinds[0]);
  int error = num_launches > 1 ? ctx.cuda.branches->Fork(stream) : cudaSuccess;
  int branches = 0;
  for (int n = 0; n < num_launches && error == cudaSuccess; ++n) {
    cudaStream_t on = stream;
    if (n > 0) error = ctx.cuda.branches->Begin(branches++, &on);
    if (error != cudaSuccess) break;
    error = launches[n].kernel(tiles_of(*launches[n].tiles, on));
  }
  const int join_error = ctx.cuda.branches->Join(stream, branches);
  if (error == cudaSuccess) error = join_error;
  if (error != cudaSuccess || layout.combines.count == 0) return error;
  return LaunchCombine(geometry.dtype, tiles_of(layout.combines, stream));
}

}  // namespace flashcore::kernels
