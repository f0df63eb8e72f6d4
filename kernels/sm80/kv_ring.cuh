// The K/V tiles of a warp group in stages.
#ifndef FLASHCORE_KERNELS_SM80_KV_RING_CUH_
#define FLASHCORE_KERNELS_SM80_KV_RING_CUH_

#include <cstdint>

#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/kv_tiles.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// The stages of a warp group, filled kStages - 1 steps ahead with the tiles of the group's phase.
template <class C>
class KvRing : public KvTiles<C> {
 public:
  __device__ __forceinline__ KvRing(const Work& work, uint32_t shared)
      : KvTiles<C>(work),
        first_row_(this->PhaseBegin(ThreadPosition<C>().warp_group)),
        stages_(shared + ThreadPosition<C>().warp_group * C::kGroupBytes) {
    key_page_ = this->Page(first_row_);
  }

  __device__ __forceinline__ int NumTiles() const { return KvTiles<C>::NumTiles(first_row_); }

  // First K/V row of the group's tile `tile`.
  __device__ __forceinline__ int32_t KvRow(int tile) const { return first_row_ + tile * kStride; }

  // Starts the copies of the first steps, a cp.async group each.
  static constexpr int kPrefilled = C::kStages - 1;
  __device__ __forceinline__ void Prefill() {
#pragma unroll
    for (int step = 0; step < kPrefilled; ++step) CopyStage(step);
  }

  // Waits until the stage of `step` is filled and the group has left the stage before; refills that
  // one for step + kStages - 1.
  __device__ __forceinline__ void Advance(int step) {
    WaitForCopies<C::kStages - 2>();
    SyncWarpGroup<C>();
    CopyStage(step + C::kStages - 1);
  }

  // Shared addresses of V of tile step - 1 and K of tile `step`.
  __device__ __forceinline__ uint32_t Value(int step) const { return stages_ + Stage(step); }
  __device__ __forceinline__ uint32_t Key(int step) const { return Value(step) + C::kTileBytes; }

  // Where the stage of `step` begins in shared memory.
  static __device__ __forceinline__ int Stage(int step) {
    return step % C::kStages * C::kStageStride;
  }

 private:
  using KvTiles<C>::kStride;

  // Starts the copies of a step and ends their cp.async group, which is empty after the last tile.
  __device__ __forceinline__ void CopyStage(int step) {
    const int32_t row = KvRow(step);
    if (step > 0 && this->Has(row - kStride)) {
      this->CopyTile(&WorkSpan::value, value_page_, row - kStride, Value(step));
    }
    if (this->Has(row)) this->CopyKeyTile(key_page_, row, Key(step));
    CommitCopies();
    value_page_ = key_page_;
    key_page_ = this->Page(row + kStride);  // a step ahead: it may come from memory
  }

  const int32_t first_row_;
  const uint32_t stages_;
  int32_t key_page_;  // of the tiles to copy next
  int32_t value_page_;
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_KV_RING_CUH_
