#include "kernels/sm80/attention_sm80.h"

#include <driver_types.h>

#include <cstddef>

#include "kernels/sm80/attend.h"
#include "kernels/smxx/combine.h"
#include "kernels/smxx/launch.h"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels {
namespace {

template <Accumulate kAccumulate>
int LaunchKind(const Geometry& geometry, int32_t tile_rows, const LaunchTiles& tiles) {
  const DType dtype = geometry.dtype;
  if (geometry.kv_dtype == KvDType::kFloat8E4M3) {
    if constexpr (kAccumulate == Accumulate::kFloat32) {
      constexpr KvDType kFp8 = KvDType::kFloat8E4M3;
      switch (geometry.head_dim) {
        case 64:
          return sm80::LaunchAttend<64, kAccumulate, kFp8>(dtype, tile_rows, tiles);
        case 128:
          return sm80::LaunchAttend<128, kAccumulate, kFp8>(dtype, tile_rows, tiles);
      }
    }
    return cudaErrorInvalidValue;
  }
  switch (geometry.head_dim) {
    case 32:
      return sm80::LaunchAttend<32, kAccumulate>(dtype, tile_rows, tiles);
    case 64:
      return sm80::LaunchAttend<64, kAccumulate>(dtype, tile_rows, tiles);
    case 96:
      return sm80::LaunchAttend<96, kAccumulate>(dtype, tile_rows, tiles);
    case 128:
      return sm80::LaunchAttend<128, kAccumulate>(dtype, tile_rows, tiles);
    case 256:
      return sm80::LaunchAttend<256, kAccumulate>(dtype, tile_rows, tiles);
  }
  return cudaErrorInvalidValue;
}

template <Accumulate kAccumulate>
int Launch(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  if (!plan.cascade_spans.empty()) return cudaErrorInvalidValue;
  const Geometry& geometry = batch.geometry;
  alignas(kWorkListAlignment) thread_local std::byte list[kMaxListInParameters];
  const bool in_parameters = WorkListBytesInMemory(batch, plan) == 0;
  if (in_parameters) PackWorkList(batch, plan, list);
  const WorkListView work(batch, plan, in_parameters ? list : ctx.work_list);
  const Partials partials(static_cast<float*>(ctx.workspace), plan.partial_rows, geometry.head_dim);
  const auto launch_tiles = [&](const WorkListView::TileArray& array) {
    const LaunchParams params{work.spans,
                              array.tiles,
                              batch.num_spans,
                              geometry.num_kv_heads,
                              RowDivider(geometry.group()),
                              ctx.finished,
                              partials};
    return LaunchTiles{params,        array.count, array.has_runs,
                       in_parameters, ctx.stream,  ctx.block_shared_bytes};
  };
  // Largest tiles first, because they take longest.
  for (int kind = kCudaTileKinds - 1; kind >= 0; --kind) {
    if (work.kinds[kind].count == 0) continue;
    const int error =
        LaunchKind<kAccumulate>(geometry, kCudaTileRows[kind], launch_tiles(work.kinds[kind]));
    if (error != cudaSuccess) return error;
  }
  if (work.combines.count == 0) return cudaSuccess;
  return LaunchCombine(geometry.dtype, launch_tiles(work.combines));
}

}  // namespace

int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  return Launch<Accumulate::kFloat32>(batch, plan, ctx);
}

int LaunchAttentionSm80Float16(const AttentionBatch& batch, const Plan& plan,
                               const LaunchContext& ctx) {
  return Launch<Accumulate::kFloat16>(batch, plan, ctx);
}

}  // namespace flashcore::kernels
