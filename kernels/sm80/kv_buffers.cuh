// The K/V tiles of a warp group in single buffers.
#ifndef FLASHCORE_KERNELS_SM80_KV_BUFFERS_CUH_
#define FLASHCORE_KERNELS_SM80_KV_BUFFERS_CUH_

#include <cstdint>

#include "kernels/cuda/work_list.h"
#include "kernels/sm80/config.cuh"
#include "kernels/sm80/kv_tiles.cuh"
#include "kernels/sm80/ptx.cuh"
#include "kernels/sm80/thread.cuh"

namespace flashcore::kernels::sm80 {

// The K and V buffers of a warp group, kBuffers of each, for its phase or for several one after
// the other.
template <class C>
class KvBuffers : public KvTiles<C> {
 public:
  __device__ __forceinline__ KvBuffers(const Work& work, uint32_t shared)
      : KvTiles<C>(work),
        shared_(shared + ThreadPosition<C>().warp_group * C::kGroupBytes),
        split_end_(work.tile.kv_begin + work.tile.split_rows) {
    if constexpr (C::kBuffers == 2) has_all_phases_ = C::kStashes || this->HasOwnSplit(work.tile);
    to_copy_ = First();
    page_ = this->Page(to_copy_);
  }

  // First K/V row of the first tile.
  __device__ __forceinline__ int32_t First() const {
    return HasAllPhases() ? FirstOfPhases(0) : this->PhaseBegin(ThreadPosition<C>().warp_group);
  }

  // Whether another phase begins at `next`, after the tile at `row`.
  __device__ __forceinline__ bool EndsPhase(int32_t row, int32_t next) const {
    return HasAllPhases() && Phase(row) != Phase(next) && this->Has(next);
  }

  // Whether the next split of a run begins at `next`.
  __device__ __forceinline__ bool EndsSplit(int32_t next) const {
    return next == split_end_ && this->Has(next);
  }
  __device__ __forceinline__ void NextSplit() { split_end_ += this->work_.tile.split_rows; }
  __device__ __forceinline__ bool IsFirstSplit() const {
    return split_end_ == this->work_.tile.kv_begin + this->work_.tile.split_rows;
  }

  // Starts the copies that come before the first step: kPrefilled cp.async groups.
  static constexpr int kPrefilled = 2 * C::kBuffers - (C::kCopiesEarly ? 0 : 1);
  __device__ __forceinline__ void Prefill() {
#pragma unroll
    for (int n = 0; n < kPrefilled; ++n) {
      if (n % 2 == 0) {
        CopyKey();
      } else {
        CopyValue();
      }
    }
  }

  // Waits for K of the next tile, the first call for that of the first. Returns the first K/V row
  // of the tile after it.
  __device__ __forceinline__ int32_t AwaitKey() {
    WaitForCopies<kPrefilled - 1>();
    SyncWarpGroup<C>();
    if constexpr (!C::kCopiesEarly) CopyValue();
    return C::kBuffers == 2 ? next_ : to_copy_;
  }

  // Then, after the last use of K, waits for V of the same tile.
  __device__ __forceinline__ void AwaitValue() {
    if constexpr (C::kCopiesEarly) {
      SyncWarpGroup<C>();
      CopyKey();
    }
    WaitForCopies<kPrefilled - 1>();
    SyncWarpGroup<C>();
    if constexpr (!C::kCopiesEarly) CopyKey();
  }

  // After the last use of V.
  __device__ __forceinline__ void LeaveValue() {
    if constexpr (C::kCopiesEarly) {
      SyncWarpGroup<C>();
      CopyValue();
    }
  }

  // Shared addresses of V and K of the tile that was waited for.
  __device__ __forceinline__ uint32_t Value() const {
    return C::kBuffers == 2 ? shared_ + buffer_ : shared_;
  }
  __device__ __forceinline__ uint32_t Key() const { return Value() + C::kTileBytes; }

 private:
  // First K/V row of the tile after the one at `row`.
  __device__ __forceinline__ int32_t Next(int32_t row) const {
    const int32_t next = row + this->kStride;
    return this->Has(next) || !HasAllPhases() ? next : FirstOfPhases(Phase(row) + 1);
  }

  // Start copying K, and then V, of the next tile to copy, if there is one, to buffers that the
  // group has left.
  __device__ __forceinline__ void CopyKey() {
    if (this->Has(to_copy_)) this->CopyKeyTile(page_, to_copy_, Key());
    CommitCopies();
  }
  __device__ __forceinline__ void CopyValue() {
    if constexpr (C::kBuffers == 2) next_ = to_copy_;
    // With one buffer that is not refilled early, it is the tile that K was waited for.
    const bool exists = (C::kBuffers == 1 && !C::kCopiesEarly) || this->Has(to_copy_);
    const int32_t next = Next(to_copy_);
    if (exists) this->CopyTile(&WorkSpan::value, page_, to_copy_, Value());
    CommitCopies();
    if (exists) to_copy_ = next;
    page_ = this->Page(to_copy_);
    if constexpr (C::kBuffers == 2) buffer_ = C::kStageStride - buffer_;
  }

  // Whether the group attends all phases, one after the other.
  __device__ __forceinline__ bool HasAllPhases() const {
    if constexpr (C::kBuffers == 2) return has_all_phases_;
    return C::kStashes || this->HasOwnSplit(this->work_.tile);
  }
  static __device__ __forceinline__ int Phase(int32_t row) {
    return row / C::kTileTokens % C::kPhases;
  }
  // First K/V row of the first of the phases from `phase` on that has any.
  __device__ __forceinline__ int32_t FirstOfPhases(int phase) const {
    while (phase < C::kPhases && !this->Has(this->PhaseBegin(phase))) ++phase;
    return phase < C::kPhases ? this->PhaseBegin(phase) : this->kv_end_;
  }

  const uint32_t shared_;
  int32_t split_end_;
  int32_t to_copy_;  // the next tile to copy
  int32_t page_;     // its
  // With two buffers:
  bool has_all_phases_ = false;  // kept, because memory would be read for it
  int32_t next_ = 0;             // the tile before to_copy_
  int32_t buffer_ = 0;           // bytes to the buffers in use
};

}  // namespace flashcore::kernels::sm80

#endif  // FLASHCORE_KERNELS_SM80_KV_BUFFERS_CUH_
