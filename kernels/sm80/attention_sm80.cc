#include "kernels/sm80/attention_sm80.h"

#include <driver_types.h>

#include "kernels/sm80/attend.h"
#include "kernels/smxx/work_list.h"

namespace flashcore::kernels {
namespace {

int AttendFp8(const Geometry& geometry, int32_t tile_rows, const sm80::AttendParams& params,
              int32_t count, void* stream) {
  switch (geometry.head_dim) {
    case 64:
      return sm80::AttendFp8<64>(tile_rows, params, count, stream);
    case 128:
      return sm80::AttendFp8<128>(tile_rows, params, count, stream);
  }
  return cudaErrorInvalidValue;
}

int Attend(const Geometry& geometry, int32_t tile_rows, const sm80::AttendParams& params,
           int32_t count, void* stream) {
  if (geometry.kv_dtype == KvDType::kFloat8E4M3) {
    return AttendFp8(geometry, tile_rows, params, count, stream);
  }
  switch (geometry.head_dim) {
    case 32:
      return sm80::Attend<32>(geometry.dtype, tile_rows, params, count, stream);
    case 64:
      return sm80::Attend<64>(geometry.dtype, tile_rows, params, count, stream);
    case 96:
      return sm80::Attend<96>(geometry.dtype, tile_rows, params, count, stream);
    case 128:
      return sm80::Attend<128>(geometry.dtype, tile_rows, params, count, stream);
    case 256:
      return sm80::Attend<256>(geometry.dtype, tile_rows, params, count, stream);
  }
  return cudaErrorInvalidValue;
}

int AttendFloat16(const Geometry& geometry, int32_t tile_rows, const sm80::AttendParams& params,
                  int32_t count, void* stream) {
  if (geometry.dtype != DType::kFloat16) return cudaErrorInvalidValue;
  switch (geometry.head_dim) {
    case 32:
      return sm80::AttendFloat16<32>(tile_rows, params, count, stream);
    case 64:
      return sm80::AttendFloat16<64>(tile_rows, params, count, stream);
    case 96:
      return sm80::AttendFloat16<96>(tile_rows, params, count, stream);
    case 128:
      return sm80::AttendFloat16<128>(tile_rows, params, count, stream);
    case 256:
      return sm80::AttendFloat16<256>(tile_rows, params, count, stream);
  }
  return cudaErrorInvalidValue;
}

// One of the two above.
using AttendFn = int (*)(const Geometry& geometry, int32_t tile_rows,
                         const sm80::AttendParams& params, int32_t count, void* stream);

int Launch(AttendFn attend, const AttentionBatch& batch, const Plan& plan,
           const LaunchContext& ctx) {
  if (!plan.cascade_spans.empty()) return cudaErrorInvalidValue;
  const Geometry& geometry = batch.geometry;
  const WorkListView work(batch, plan, ctx.work_list);
  const Partials partials(static_cast<float*>(ctx.workspace), plan.partial_rows, geometry.head_dim);
  // Large tiles first: they take longest.
  for (int kind = kCudaTileKinds - 1; kind >= 0; --kind) {
    const auto [items, count] = work.kinds[kind];
    if (count == 0) continue;
    const sm80::AttendParams params{items, work.finished, partials, RowDivider(geometry.group()),
                                    geometry.num_kv_heads};
    const int error = attend(geometry, kCudaTileRows[kind], params, count, ctx.stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int LaunchAttentionSm80(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  return Launch(Attend, batch, plan, ctx);
}

int LaunchAttentionSm80Float16(const AttentionBatch& batch, const Plan& plan,
                               const LaunchContext& ctx) {
  return Launch(AttendFloat16, batch, plan, ctx);
}

}  // namespace flashcore::kernels
