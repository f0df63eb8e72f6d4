// One function for each PTX instruction that the sm80 kernels use.
#ifndef FLASHCORE_KERNELS_SM80_PTX_CUH_
#define FLASHCORE_KERNELS_SM80_PTX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace flashcore::kernels::sm80 {

// The block's dynamic shared memory.
__device__ __forceinline__ std::byte* SharedMemory() {
  extern __shared__ __align__(128) std::byte memory[];
  return memory;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts copying 16 bytes from global to shared memory, bypassing L1. If not `valid`, writes zeros
// and does not read `global`.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const std::byte* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// As CopyAsync16, of bytes that leave L2 before others.
__device__ __forceinline__ void CopyAsync16EvictFirst(uint32_t shared, const std::byte* global,
                                                      bool valid) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// Ends the thread's current group of copies, which may be empty.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the thread's kGroups newest groups are in flight.
template <int kGroups>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Loads 2 bytes from shared memory.
__device__ __forceinline__ uint16_t Load2(uint32_t shared) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(shared) : "memory");
  return half;
}

// Loads one, two or four numbers from shared memory.
__device__ __forceinline__ float Load4(uint32_t shared) {
  float one;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(one) : "r"(shared) : "memory");
  return one;
}
__device__ __forceinline__ float2 Load8(uint32_t shared) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(two.x), "=f"(two.y)
               : "r"(shared)
               : "memory");
  return two;
}
__device__ __forceinline__ float4 Load16(uint32_t shared) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(shared)
               : "memory");
  return four;
}

// Stores one or two numbers to shared memory.
__device__ __forceinline__ void Store4(uint32_t shared, float number) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(number) : "memory");
}
__device__ __forceinline__ void Store8(uint32_t shared, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second)
               : "memory");
}

// Loads 8 bytes from shared memory.
__device__ __forceinline__ void Load8(uint32_t shared, uint32_t& first, uint32_t& second) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(first), "=r"(second)
               : "r"(shared)
               : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. `row` of lane l is the shared address of row l % 8 of
// matrix l / 8. Lane l receives elements 2 * (l % 4) and the next of row l / 4 of each matrix.
__device__ __forceinline__ void LoadMatrices(uint32_t row, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// Two of them; lanes 16 to 31 give no address.
__device__ __forceinline__ void LoadMatrices(uint32_t row, uint32_t (&matrices)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrices[0]), "=r"(matrices[1])
               : "r"(row)
               : "memory");
}

// The transpose of an 8x8 matrix of 16-bit elements, of which each lane has what LoadMatrices
// gives.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// Transposed: lane l receives column l / 4, rows 2 * (l % 4) and the next, of each matrix.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t row, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// sum[16 x 8] += a[16 x 16] * b[16 x 8] in float32. Elements of a lane, with g = lane / 4 and t =
// lane % 4:
//   sum: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)             (row, column)
//   a:   pairs from (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
//   b:   pairs down a column from (2t, g), (2t + 8, g)
template <class Element>
__device__ __forceinline__ void Mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    float (&sum)[4]);

template <>
__device__ __forceinline__ void Mma<__half>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            float (&sum)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void Mma<__nv_bfloat16>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                   float (&sum)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum[16 x 8] = from + a[16 x 32] * b[32 x 8] in INT32, of codes: Code, int8_t or uint8_t, and
// int8_t. Elements of a lane:
//   sum: as above
//   a:   four from (g, 4t), (g + 8, 4t), (g, 4t + 16), (g + 8, 4t + 16)
//   b:   four down a column from (4t, g), (4t + 16, g)
template <class Code>
__device__ __forceinline__ void MmaCodes(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const int32_t (&from)[4], int32_t (&sum)[4]);

template <>
__device__ __forceinline__ void MmaCodes<int8_t>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                 const int32_t (&from)[4], int32_t (&sum)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(from[0]), "r"(from[1]),
        "r"(from[2]), "r"(from[3]));
}

template <>
__device__ __forceinline__ void MmaCodes<uint8_t>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                  const int32_t (&from)[4], int32_t (&sum)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sum[0]), "=r"(sum[1]), "=r"(sum[2]), "=r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(from[0]), "r"(from[1]),
        "r"(from[2]), "r"(from[3]));
}

// The initial sums of a tile: zeros, or with kFloats the bits of kIntegerBase. INT32 sums of less
// than 2^22 are then the floats kIntegerBase + sum, without a conversion.
template <bool kFloats>
struct FirstSums {
  __device__ __forceinline__ FirstSums() {
#pragma unroll
    for (int32_t& sum : sums) {
      if constexpr (kFloats) {
        asm volatile("mov.b32 %0, %1;" : "=r"(sum) : "n"(0x4b400000));  // in a register
      } else {
        sum = 0;
      }
    }
  }
  int32_t sums[4];
};

// sum += a * b in float16, for float16 elements only. Elements of a lane:
//   sum: pairs from (g, 2t), (g + 8, 2t)
template <class Element>
__device__ __forceinline__ void Mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    uint32_t (&sum)[2]);

template <>
__device__ __forceinline__ void Mma<__half>(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            uint32_t (&sum)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
      "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(sum[0]), "+r"(sum[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_PTX_CUH_
