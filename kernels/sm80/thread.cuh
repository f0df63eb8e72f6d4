// The threads of a block: their places, and what each has of a tile.
#ifndef FLASHCORE_KERNELS_SM80_THREAD_CUH_
#define FLASHCORE_KERNELS_SM80_THREAD_CUH_

#include <cstdint>

#include "kernels/sm80/config.cuh"

namespace flashcore::kernels::sm80 {

// The block's KV head. Each call reads it again: it need not stay in a register between two.
__device__ __forceinline__ int KvHead() {
  uint32_t kv_head;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(kv_head));
  return static_cast<int>(kv_head);
}

// The thread's number in the block. With kFewRegisters, each call reads it again: whatever follows
// from it need not stay in registers between two of them.
template <class C>
__device__ __forceinline__ int ThreadIndex() {
  if constexpr (!C::kFewRegisters) return threadIdx.x;
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if constexpr (C::kCodes) __builtin_assume(thread < C::kThreads);  // saves what a sign takes
  return static_cast<int>(thread);
}

// The calling thread's place in the block.
template <class C>
struct ThreadPosition {
  __device__ __forceinline__ ThreadPosition() {
    const auto thread = static_cast<uint32_t>(ThreadIndex<C>());
    lane = thread % 32;
    row_warp = thread / 32 % C::kRowWarps;
    warp_group = C::kWarpGroups == 1 ? 0 : thread / 32 / C::kRowWarps;
  }

  // The work tile's row that is this lane's row i (0 or 1) of row tile m.
  __device__ __forceinline__ int Row(int m, int i) const {
    return row_warp * C::kWarpRows + m * C::kMmaRows + FirstRow() + C::kRowStep * i;
  }
  // The same for row tile 0 and i = 0, in the warp's rows; the second is kRowStep further.
  __device__ __forceinline__ int FirstRow() const {
    return C::kTransposed ? lane % 4 * 2 : lane / 4;
  }
  // Whether the lane is the first of those that share its rows.
  __device__ __forceinline__ bool IsFirstOfRows() const {
    return (C::kTransposed ? lane / 4 : lane % 4) == 0;
  }

  // The first of this lane's two tokens of score tile 0; the second is kTokenStep further.
  __device__ __forceinline__ int FirstToken() const {
    return C::kTransposed ? lane / 4 : lane % 4 * 2;
  }

  // The first of this lane's two columns of output tile n (operands.cuh).
  __device__ __forceinline__ int Column(int n) const {
    if constexpr (C::kTransposed) return 16 * n + lane / 4 * 2;
    return C::kCodes ? 16 * (n / 2) + lane % 4 * 4 + 2 * (n % 2) : 8 * n + lane % 4 * 2;
  }

  int lane;
  int row_warp;
  int warp_group;
};

// A lane's four accumulators of an mma are of two packed rows. Accumulator j (0 or 1) of its row i,
// and the row of accumulator c:
template <class C>
__device__ __forceinline__ constexpr int AccumulatorAt(int i, int j) {
  return C::kTransposed ? 2 * j + i : 2 * i + j;
}
template <class C>
__device__ __forceinline__ constexpr int RowOfAccumulator(int c) {
  return C::kTransposed ? c % 2 : c / 2;
}

// Barrier for the threads of one KV warp group.
template <class C>
__device__ __forceinline__ void SyncWarpGroup() {
  if constexpr (C::kWarpGroups == 1) {
    __syncthreads();
  } else if constexpr (C::kGroupThreads == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(ThreadPosition<C>().warp_group + 1), "n"(C::kGroupThreads)
                 : "memory");
  }
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_THREAD_CUH_
