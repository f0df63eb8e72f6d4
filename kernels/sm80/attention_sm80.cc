#include "kernels/sm80/attention_sm80.h"

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/sm80/attend.h"
#include "kernels/smxx/branches.h"
#include "kernels/smxx/combine.h"
#include "kernels/smxx/launch.h"
#include "kernels/smxx/work_list.h"
#include "kernels/tile_config.h"

namespace flashcore::kernels {
namespace {

// Launches the kernel for tiles of tile_rows packed rows.
template <int kHeadDim>
int LaunchKind(const KernelSpec& spec, int32_t tile_rows, const LaunchTiles& tiles) {
  const bool float16_sums = spec.accumulate == Accumulate::kFloat16;
  if (spec.kv_dtype == KvDType::kFloat8E4M3) {
    if constexpr (kHeadDim == 64 || kHeadDim == 128) {
      if (float16_sums) return cudaErrorInvalidValue;
      return sm80::LaunchAttend<kHeadDim, Accumulate::kFloat32, KvDType::kFloat8E4M3>(
          spec.dtype, tile_rows, tiles);
    }
    return cudaErrorInvalidValue;
  }
  return float16_sums
             ? sm80::LaunchAttend<kHeadDim, Accumulate::kFloat16>(spec.dtype, tile_rows, tiles)
             : sm80::LaunchAttend<kHeadDim>(spec.dtype, tile_rows, tiles);
}

int LaunchKind(const KernelSpec& spec, int32_t tile_rows, const LaunchTiles& tiles) {
  switch (spec.head_dim) {
    case 32:
      return LaunchKind<32>(spec, tile_rows, tiles);
    case 64:
      return LaunchKind<64>(spec, tile_rows, tiles);
    case 96:
      return LaunchKind<96>(spec, tile_rows, tiles);
    case 128:
      return LaunchKind<128>(spec, tile_rows, tiles);
    case 256:
      return LaunchKind<256>(spec, tile_rows, tiles);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int LaunchAttentionSm80(const KernelSpec& spec, const AttentionBatch& batch, const Plan& plan,
                        const LaunchContext& ctx) {
  const Geometry& geometry = batch.geometry;
  alignas(kWorkListAlignment) thread_local std::byte list[kMaxListInParameters];
  const WorkListLayout layout(batch, plan);
  const bool in_parameters = layout.BytesInMemory() == 0;
  if (in_parameters) PackWorkList(batch, plan, layout, list);
  void* const work_list = in_parameters ? list : ctx.work_list;
  const Partials partials(static_cast<float*>(ctx.workspace), plan.partial_rows, geometry.head_dim);
  const SharedSize shared = SharedSizeOf(spec.arch);
  auto* const stream = static_cast<cudaStream_t>(ctx.stream);
  const auto tiles_of = [&](const WorkListLayout::TileArray& array, cudaStream_t on) {
    const LaunchParams params{static_cast<const WorkSpan*>(work_list),
                              array.In(work_list),
                              geometry.num_kv_heads,
                              RowDivider(geometry.group()),
                              ctx.finished,
                              partials};
    return LaunchTiles{params,
                       array.count,
                       array.members,
                       array.most_rows,
                       layout.head_bytes,
                       array.has_runs,
                       in_parameters,
                       shared,
                       on};
  };
  // Each kind runs beside the others: decodes wait for memory while a prefill multiplies, and small
  // tiles fill the last round of large ones. Largest tiles first, because they take longest, and
  // cascade items before the other splits of their spans.
  struct Launch {
    int32_t tile_rows;
    const WorkListLayout::TileArray* tiles;
  };
  Launch launches[kCudaTileKinds + 1];
  int num_launches = 0;
  const auto add = [&](int32_t tile_rows, const WorkListLayout::TileArray& tiles) {
    if (tiles.count > 0) launches[num_launches++] = {tile_rows, &tiles};
  };
  for (int kind = kCudaTileKinds - 1; kind > 0; --kind) {
    add(kCudaTileRows[kind], layout.kinds[kind]);
  }
  add(kCudaCascadeRows, layout.cascades);
  add(kCudaTileRows[0], layout.kinds[0]);
  int error = num_launches > 1 ? ctx.branches->Fork(stream) : cudaSuccess;
  int branches = 0;
  for (int n = 0; n < num_launches && error == cudaSuccess; ++n) {
    cudaStream_t on = stream;
    if (n > 0) error = ctx.branches->Begin(branches++, &on);
    if (error != cudaSuccess) break;
    error = LaunchKind(spec, launches[n].tile_rows, tiles_of(*launches[n].tiles, on));
  }
  const int join_error = ctx.branches->Join(stream, branches);
  if (error == cudaSuccess) error = join_error;
  if (error != cudaSuccess || layout.combines.count == 0) return error;
  return LaunchCombine(geometry.dtype, tiles_of(layout.combines, stream));
}

}  // namespace flashcore::kernels
