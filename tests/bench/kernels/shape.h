// The shape of a benchmark's attention problem, the grammar it is written in, and its work and
// bytes.
//
//   SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal][,window=LEFT:RIGHT][,paged]
//       [,prefix=ROWS]
//
// ROWS is the K/V rows of a span, and its query rows unless q is given. K and V are dense,
// [kv_heads, rows, head_dim], unless they are paged. prefix: the leading K/V rows that all spans
// share, whole pages; implies paged.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_SHAPE_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_SHAPE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Spans of equal shape.
struct AttentionShape {
  DType dtype = DType::kFloat16;
  int32_t spans = 1;
  int32_t num_heads = 8;
  int32_t num_kv_heads = 8;
  int32_t query_rows = 512;
  int32_t kv_rows = 512;
  int32_t head_dim = 64;
  Mask mask;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Precision precision = Precision::k16Bit;
  bool paged = false;
  int32_t prefix_rows = 0;

  Geometry geometry() const {
    return {dtype, num_heads, num_kv_heads, head_dim, kv_dtype, precision};
  }
};

struct BenchShape {
  std::string name;
  AttentionShape attention;
};

struct NamedShape {
  const char* name;
  const char* shape;  // by the grammar
};

inline constexpr NamedShape kNamedShapes[] = {
    {"mission", "1x8x512x64"},
    {"mission_causal", "1x8x512x64,causal"},
    {"seed2", "2x8x256x64"},
    {"canon_3", "2x8x512x64"},
    {"b8", "8x8x512x64"},
    {"long", "1x8x2048x64"},
    {"long_causal", "1x8x2048x64,causal"},
    {"canon_1", "4x16x2048x128"},
    {"canon_1_causal", "4x16x2048x128,causal"},
    {"prefill", "1x32/8x8192x128,causal"},
    {"decode1", "1x32/8x4096x128,q=1"},
    {"decode16", "16x32/8x4096x128,q=1"},
    {"decode64", "64x32/8x4096x128,q=1"},
    {"decode_long", "1x32/8x32768x128,q=1"},
    {"decode64_d64", "64x8x4096x64,q=1"},
    {"decode_small", "1x8x512x64,q=1"},
    {"verify16", "4x32/8x8192x128,q=16"},
    {"chunk64", "1x32/8x32768x128,q=64"},
    {"chunk256", "1x32/8x32768x128,q=256"},
    {"chunk1024", "1x32/8x32768x128,q=1024"},
};

// Parses a name of kNamedShapes, or a shape by the grammar, which is then its own name. Leaves the
// dtypes and the precision at their defaults. Returns what is wrong with `text`; empty if nothing
// is.
std::string ParseShape(const std::string& text, BenchShape* shape);

// Multiplications and additions of Q.K^T and P.V over what the mask leaves visible.
double Flops(const AttentionShape& shape);
// Bytes of Q; O has as many.
int64_t QueryBytes(const AttentionShape& shape);
// Bytes of K and V together, with the scales of 8-bit rows. A shared prefix counts for each span.
int64_t KvBytes(const AttentionShape& shape);
// The same, but a shared prefix counts once.
int64_t StoredKvBytes(const AttentionShape& shape);
// Bytes that a launch has to move at least: Q, K, V and O, once.
int64_t SetBytes(const AttentionShape& shape);

// Page tables of paged K/V, [spans][pages of a span]: the pages of the shared prefix, then each
// span's own pages, in ascending order.
std::vector<int32_t> PageTable(const AttentionShape& shape);

// The tensors of one launch. Q and O are [spans, heads, query_rows, head_dim],
// dense K and V [spans, kv_heads, kv_rows, head_dim], all contiguous. Paged K/V starts at `key`:
// [pages][K, V][kv_heads][64][head_dim], of 8-bit K/V with scales (kernels/attention.h).
struct Tensors {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;  // dense K/V only
  const int32_t* pages = nullptr;    // [spans, pages of a span]; null if K/V is dense
  std::byte* output = nullptr;
};

// The spans of `shape` over `tensors`, with softmax_scale 1 / sqrt(head_dim) and no LSE.
std::vector<Span> MakeSpans(const AttentionShape& shape, const Tensors& tensors);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_SHAPE_H_
