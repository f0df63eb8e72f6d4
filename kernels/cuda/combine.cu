#include <utility>

#include "kernels/cuda/combine.cuh"
#include "kernels/cuda/combine.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/plan.h"

namespace flashcore::kernels {
namespace {

// A block combines few rows of a tile, so that the rows of one span spread over all SMs.
constexpr int kRows = 4;
constexpr int kThreads = 128;
// Blocks on an SM. ptxas takes the registers that these leave to load all parts of a run at once;
// without a number it takes half as many, and loads them one after the other.
constexpr int kMinBlocks = 6;

template <class Element, size_t kListBytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    CombineKernel(const __grid_constant__ LaunchArguments<kListBytes> arguments) {
  const LaunchParams& params = arguments.params;
  const Work work = arguments.WorkAt(blockIdx.y);
  const int begin = blockIdx.z * kRows;
  using RunParts = std::integer_sequence<int, 1, kSmallRunSplits, kRunSplits>;
  CombineParts<Element>(RunParts(), work, blockIdx.x, params.group, params.partials, begin,
                        min(begin + kRows, work.tile.row_count), threadIdx.x, kThreads);
}

template <class Element>
int Launch(const LaunchTiles& tiles) {
  return ForListSize(tiles, [&](auto list_bytes) {
    return LaunchWithList(CombineKernel<Element, decltype(list_bytes)::value>, tiles,
                          (tiles.most_rows + kRows - 1) / kRows, kThreads, 0);
  });
}

}  // namespace

int LaunchCombine(DType dtype, const LaunchTiles& tiles) {
  return dtype == DType::kFloat16 ? Launch<__half>(tiles) : Launch<__nv_bfloat16>(tiles);
}

}  // namespace flashcore::kernels
