// The two matrix products of attention on one K/V tile, with float32 sums in registers: Multiply
// (P V, and Q K^T over a transposed K tile) and DotScores (Q K^T along K rows). Included once per
// SIMD target.
#if defined(FLASHCORE_KERNELS_CPU_MULTIPLY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHCORE_KERNELS_CPU_MULTIPLY_INL_H_
#undef FLASHCORE_KERNELS_CPU_MULTIPLY_INL_H_
#else
#define FLASHCORE_KERNELS_CPU_MULTIPLY_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/cpu/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashcore::kernels {
namespace HWY_NAMESPACE {

// Register block of Multiply: kBlockRows x kBlockVectors sums stay in registers while k runs.
//
//                     B[k][c .. c + kBlockVectors * kLanes)
//                     [ vector ][ vector ][ vector ][ vector ]
//   A[r + 0][k] ->    [  sum   ][  sum   ][  sum   ][  sum   ]   += A[r][k] broadcast * B vector
//   ...
//   A[r + 5][k] ->    [  sum   ][  sum   ][  sum   ][  sum   ]
//
// 6 x 4 needs 28 of AVX-512's 32 registers, 6 x 2 needs 15 of AVX2's 16.
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kLanes >= 16 ? 4 : 2;

// The tokens [begin, end) of one K/V tile, counted from its first.
struct TokenRange {
  int begin;
  int end;
};

// B as float32 rows in scratch, 64-byte aligned.
struct FloatRows {
  const float* base;
  int64_t stride;  // floats

  FloatRows From(int column) const { return {base + column, stride}; }
  HWY_INLINE VecF Load(int64_t row, int vector) const {
    return hn::Load(FloatTag(), base + row * stride + vector * kLanes);
  }
};

// B as rows in K/V memory, converted on load.
template <Element kElement>
struct ElementRows {
  static constexpr int kBytes = ElementBytes(kElement);
  const std::byte* base;
  int64_t stride;  // bytes

  ElementRows From(int column) const { return {base + column * kBytes, stride}; }
  HWY_INLINE VecF Load(int64_t row, int vector) const {
    return LoadElements<kElement>(FloatTag(), base + row * stride + vector * kLanes * kBytes);
  }
};

// B as rows in K/V memory, each at its own address.
template <Element kElement>
struct ScatteredRows {
  const std::byte* const* rows;

  HWY_INLINE VecF Load(int64_t row, int vector) const {
    return LoadElements<kElement>(FloatTag(), rows[row] + vector * kLanes * ElementBytes(kElement));
  }
};

// C[r][c] = C[r][c] * rescale[r] + sum over k in `range` of A[r][k] * B[k][c], for one register
// block. Null rescale: C is written, not read. C[r][c] is always summed in ascending k, so a row's
// bits do not depend on the other rows of the block.
template <int kRows, int kVectors, class Rows>
HWY_INLINE void MultiplyBlock(const float* HWY_RESTRICT a, int64_t a_stride, const Rows& b,
                              TokenRange range, const float* HWY_RESTRICT rescale,
                              float* HWY_RESTRICT c, int64_t c_stride) {
  const FloatTag d;
  VecF sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = rescale == nullptr
                      ? hn::Zero(d)
                      : hn::Mul(hn::Load(d, c + r * c_stride + v * kLanes), hn::Set(d, rescale[r]));
    }
  }
  for (int k = range.begin; k < range.end; ++k) {
    VecF row[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) row[v] = b.Load(k, v);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const VecF scale = hn::Set(d, a[r * a_stride + k]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(scale, row[v], sum[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) hn::Store(sum[r][v], d, c + r * c_stride + v * kLanes);
  }
}

// MultiplyBlock for `count` rows, 1 to kMaxRows.
template <int kMaxRows, int kVectors, class Rows>
HWY_INLINE void MultiplyRows(int count, const float* a, int64_t a_stride, const Rows& b,
                             TokenRange range, const float* rescale, float* c, int64_t c_stride) {
  if constexpr (kMaxRows > 1) {
    if (count < kMaxRows) {
      MultiplyRows<kMaxRows - 1, kVectors>(count, a, a_stride, b, range, rescale, c, c_stride);
      return;
    }
  }
  MultiplyBlock<kMaxRows, kVectors>(a, a_stride, b, range, rescale, c, c_stride);
}

// One column block of C[rows][columns] = A[rows][..] * B[..][columns]. Entry r of `visible`, if it
// is not null, is the part of `range` where A[r] may be non-zero: begins and ends never decrease
// with r. A register block covers the union of its rows' ranges.
template <int kVectors, class Rows>
HWY_INLINE void MultiplyColumns(const float* a, int64_t a_stride, const Rows& b, TokenRange range,
                                const TokenRange* visible, const float* rescale, float* c,
                                int64_t c_stride, int rows) {
  for (int r = 0; r < rows; r += kBlockRows) {
    const int count = HWY_MIN(kBlockRows, rows - r);
    const TokenRange k =
        visible == nullptr ? range : TokenRange{visible[r].begin, visible[r + count - 1].end};
    const float* scale = rescale == nullptr ? nullptr : rescale + r;
    const float* from = a + r * a_stride;
    float* to = c + r * c_stride;
    MultiplyRows<kBlockRows, kVectors>(count, from, a_stride, b, k, scale, to, c_stride);
  }
}

// All columns, a multiple of 32.
template <class Rows>
HWY_INLINE void Multiply(const float* a, int64_t a_stride, const Rows& b, TokenRange range,
                         const TokenRange* visible, const float* rescale, float* c,
                         int64_t c_stride, int rows, int columns) {
  constexpr int kStep = kBlockVectors * kLanes;
  int column = 0;
  for (; column + kStep <= columns; column += kStep) {
    MultiplyColumns<kBlockVectors>(a, a_stride, b.From(column), range, visible, rescale, c + column,
                                   c_stride, rows);
  }
  if constexpr (kStep > 32) {  // head_dim 32 and 96
    for (; column < columns; column += 2 * kLanes) {
      MultiplyColumns<2>(a, a_stride, b.From(column), range, visible, rescale, c + column, c_stride,
                         rows);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR
template <class D, class V = hn::Vec<D>>
HWY_INLINE V SumEach(D, const V* v) {
  return v[0];
}
#else
// Partial lane sums of 4 vectors at once, within each 128-bit block: lane i of a block is the sum
// of that block's 4 lanes of the i-th argument.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V AddFour(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> dw;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto wide_ab = hn::BitCast(dw, ab), wide_ce = hn::BitCast(dw, ce);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, wide_ab, wide_ce)),
                 hn::BitCast(d, hn::InterleaveUpper(dw, wide_ab, wide_ce)));
}

// Returns the vector whose lane i is the sum of all lanes of v[i], for kLanes vectors.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V SumEach(D d, const V* v) {
  if constexpr (kLanes == 4) {
    return AddFour(d, v[0], v[1], v[2], v[3]);
  } else if constexpr (kLanes == 8) {
    const V low = AddFour(d, v[0], v[1], v[2], v[3]);
    const V high = AddFour(d, v[4], v[5], v[6], v[7]);
    return hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
  } else {
    const V q0 = AddFour(d, v[0], v[1], v[2], v[3]);
    const V q1 = AddFour(d, v[4], v[5], v[6], v[7]);
    const V q2 = AddFour(d, v[8], v[9], v[10], v[11]);
    const V q3 = AddFour(d, v[12], v[13], v[14], v[15]);
    // Add the halves of q0 and q2, then of q1 and q3. Interleaving the blocks gives q0 q1 q2 q3.
    const V q02 = hn::Add(hn::ConcatLowerLower(d, q2, q0), hn::ConcatUpperUpper(d, q2, q0));
    const V q13 = hn::Add(hn::ConcatLowerLower(d, q3, q1), hn::ConcatUpperUpper(d, q3, q1));
    return hn::Add(hn::OddEvenBlocks(q13, q02),
                   hn::SwapAdjacentBlocks(hn::OddEvenBlocks(q02, q13)));
  }
}

#endif  // HWY_TARGET

// The K and V rows of the next tile, prefetched while this tile is computed: hardware prefetchers
// do not follow page tables. Null pointers: no next tile.
struct NextTile {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t row_stride = 0;  // bytes
  int64_t row_bytes = 0;

  HWY_INLINE void PrefetchToken(int token) const {
    if (key == nullptr) return;
    constexpr int kCacheLine = 64;
    for (int64_t at = token * row_stride, end = at + row_bytes; at < end; at += kCacheLine) {
      hwy::Prefetch(key + at);
      hwy::Prefetch(value + at);
    }
  }
};

// scores[r][j] = query[r] . keys[j] for the 64 tokens of a tile. The sums run along head_dim, so K
// is not transposed. A row's bits do not depend on kRows, nor on where and in which type K is
// stored.
template <int kRows, class Rows>
HWY_INLINE void DotRows(const float* HWY_RESTRICT query, const Rows& keys, const NextTile& next,
                        int head_dim, float* HWY_RESTRICT scores) {
  const FloatTag d;
  constexpr int kTokens = kLanes >= 4 ? 4 : 1;
  for (int j = 0; j < kPageTokens; j += kLanes) {
    VecF lanes[kRows][kLanes];
    for (int t = 0; t < kLanes; t += kTokens) {
      VecF sum[kRows][kTokens];
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        HWY_UNROLL(8)
        for (int i = 0; i < kTokens; ++i) sum[r][i] = hn::Zero(d);
      }
      for (int i = 0; i < kTokens; ++i) next.PrefetchToken(j + t + i);
      for (int c = 0; c < head_dim; c += kLanes) {
        VecF key[kTokens];
        HWY_UNROLL(8)
        for (int i = 0; i < kTokens; ++i) key[i] = keys.Load(j + t + i, c / kLanes);
        HWY_UNROLL(8)
        for (int r = 0; r < kRows; ++r) {
          const VecF q = hn::Load(d, query + r * head_dim + c);
          HWY_UNROLL(8)
          for (int i = 0; i < kTokens; ++i) sum[r][i] = hn::MulAdd(q, key[i], sum[r][i]);
        }
      }
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        HWY_UNROLL(8)
        for (int i = 0; i < kTokens; ++i) lanes[r][t + i] = sum[r][i];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      hn::Store(SumEach(d, lanes[r]), d, scores + r * kPageTokens + j);
    }
  }
}

template <class Rows>
HWY_INLINE void DotScores(const float* query, const Rows& keys, NextTile next, int head_dim,
                          float* scores, int count) {
  for (int r = 0; r < count; r += 4, next = {}) {
    const float* q = query + r * head_dim;
    float* s = scores + r * kPageTokens;
    switch (HWY_MIN(4, count - r)) {
      case 4:
        DotRows<4>(q, keys, next, head_dim, s);
        break;
      case 3:
        DotRows<3>(q, keys, next, head_dim, s);
        break;
      case 2:
        DotRows<2>(q, keys, next, head_dim, s);
        break;
      default:
        DotRows<1>(q, keys, next, head_dim, s);
        break;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace flashcore::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
