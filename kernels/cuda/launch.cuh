// Launches a kernel over a work list, which travels in the kernel's parameters or is in memory.
#ifndef FLASHCORE_KERNELS_CUDA_LAUNCH_CUH_
#define FLASHCORE_KERNELS_CUDA_LAUNCH_CUH_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/cuda_raii.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/work_list.h"

namespace flashcore::kernels {

// The parameters of a launch: those of all its blocks, then kListBytes for the work list.
template <size_t kListBytes>
struct LaunchArguments {
  explicit LaunchArguments(const LaunchParams& of_all) : params(of_all) {}

  __device__ __forceinline__ Work WorkAt(int tile) const {
    const WorkTile& at = reinterpret_cast<const WorkTile*>(list + head_bytes)[tile];
    return {at, reinterpret_cast<const WorkSpan*>(list)[at.span]};
  }

  LaunchParams params;
  int32_t head_bytes = 0;
  alignas(16) std::byte list[kListBytes];
};
template <>
struct LaunchArguments<0> {
  explicit LaunchArguments(const LaunchParams& of_all) : params(of_all) {}

  __device__ __forceinline__ Work WorkAt(int tile) const {
    const WorkTile& at = params.tiles[tile];
    return {at, params.spans[at.span]};
  }

  LaunchParams params;
};

// Work lists in parameters have one of two sizes: few bytes take less of the host's time.
inline constexpr size_t kSmallListBytes = 3968;  // all parameters take at most 4 KB
inline constexpr int32_t kMaxGridY = 65535;

template <size_t kListBytes>
cudaError_t LaunchWithList(void (*kernel)(LaunchArguments<kListBytes>), const LaunchTiles& tiles,
                           int32_t blocks_of_a_tile, int threads, int shared_bytes) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  LaunchArguments<kListBytes> arguments(tiles.params);
  if constexpr (kListBytes > 0) {
    arguments.head_bytes = static_cast<int32_t>(tiles.head_bytes);
    memcpy(arguments.list, tiles.params.spans, tiles.head_bytes);
    memcpy(arguments.list + tiles.head_bytes, tiles.params.tiles, tiles.tile_bytes());
  }
  for (int32_t left = tiles.count; left > 0; left -= kMaxGridY) {
    const dim3 grid(tiles.params.num_kv_heads, std::min(left, kMaxGridY), blocks_of_a_tile);
    const cudaError_t error =
        LaunchKernel(kernel, grid, threads, shared_bytes, tiles.stream, arguments);
    if (error != cudaSuccess) return error;
    arguments.params.tiles += kMaxGridY;
  }
  return cudaSuccess;
}

// Calls launch(std::integral_constant<size_t, kListBytes>()) with the size of the list's parameter,
// at least kLeastBytes; 0 for a list in memory.
template <size_t kLeastBytes = kSmallListBytes, class Launch>
auto ForListSize(const LaunchTiles& tiles, const Launch& launch) {
  if (!tiles.in_parameters) return launch(std::integral_constant<size_t, 0>());
  const size_t bytes = tiles.head_bytes + tiles.tile_bytes();
  if (bytes <= kLeastBytes) return launch(std::integral_constant<size_t, kLeastBytes>());
  return launch(std::integral_constant<size_t, kMaxListInParameters>());
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_CUDA_LAUNCH_CUH_
