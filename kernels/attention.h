// The seam between the server and every attention kernel, on any device.
//
// A batch is a ragged list of spans. One span is one sequence's share of a request: its query rows
// and the K/V they attend to. For each span, query head h, and query row i:
//
//   O[i, h] = sum_j softmax_j(scale * Q[i, h] . K[j, h / group]) * V[j, h / group]
//   LSE[i, h] = log(sum_j exp(scale * Q[i, h] . K[j, h / group]))          (natural logarithm)
//
// over the K/V rows j that the mask makes visible to row i, where group = num_heads / num_kv_heads
// (grouped-query attention: consecutive query heads share one KV head). A query row with no visible
// K/V row gets O = 0 and LSE = -infinity.
//
// Q, K and V must be finite. A NaN or infinity in them touches only outputs of its own span: the
// rows that attend to it, and possibly rows that mask it. Whatever lies in K/V memory at or beyond
// a span's length (page tails, recycled pages, padding) touches no result, NaN and infinity
// included.
//
// These structs own no memory and kernels check nothing: the server validates a request before it
// becomes a span. This header includes neither CUDA nor gRPC, so any file can include it.
#ifndef FLASHCORE_KERNELS_ATTENTION_H_
#define FLASHCORE_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>

namespace flashcore::kernels {

// Tokens in one K/V page. No KV tile crosses a page, so paging costs one index per tile.
inline constexpr int kPageTokens = 64;

// Pages that hold `rows` K/V rows.
inline constexpr int32_t PagesFor(int32_t rows) { return (rows + kPageTokens - 1) / kPageTokens; }

enum class DType : uint8_t { kFloat16, kBFloat16 };

inline constexpr size_t DTypeBytes(DType) { return 2; }

// Element type of K and V. An element of 8-bit K/V is a code, E4M3 (kernels/fp8.h) or INT8, that
// means scale * code, where each row of each KV head has a scale, of K and of V
// (kernels/kv_8bit.h). Only paged K/V can be 8-bit.
enum class KvDType : uint8_t { kSameAsQuery, kFloat8E4M3, kInt8 };

inline constexpr bool Is8Bit(KvDType kv_dtype) { return kv_dtype != KvDType::kSameAsQuery; }

inline constexpr size_t KvElementBytes(DType dtype, KvDType kv_dtype) {
  return Is8Bit(kv_dtype) ? 1 : DTypeBytes(dtype);
}

// A row's scale: a BFloat16.
inline constexpr size_t KvRowScaleBytes(KvDType kv_dtype) { return Is8Bit(kv_dtype) ? 2 : 0; }

// Type in which Q.K^T and P.V are summed.
enum class Accumulate : uint8_t { kFloat32, kFloat16 };

// The least precise products that a request accepts over INT8 K/V; kernels may be more precise, and
// over other K/V are. Each row of Q of each query head has a scale, its largest magnitude / n, and
// becomes integers, element / scale rounded. Products of codes are summed in INT32, without
// rounding.
//   k16Bit     Q of 16 bits: n = 32512. CPU kernels take Q as it is.
//   kInt8Qk    Q of 8 bits: n = 127.
//   kInt8QkPv  P V of codes, too. The products of a row's probabilities and the scales of V's rows
//              are rounded to 8 bits without sign: 255 for the largest of a K/V tile.
enum class Precision : uint8_t { k16Bit, kInt8Qk, kInt8QkPv };

// Which K/V rows are visible to a query row. Row i of a span is at position
// p = i + kv_rows - query_rows (the last query row is aligned with the last K/V row: "bottom
// right"). It attends to the K/V rows j with p - left <= j <= p + right. kUnbounded: no limit on
// that side.
struct Mask {
  static constexpr int32_t kUnbounded = std::numeric_limits<int32_t>::max();
  int32_t left = kUnbounded;
  int32_t right = kUnbounded;

  static constexpr Mask None() { return {}; }
  static constexpr Mask Causal() { return {kUnbounded, 0}; }
  static constexpr Mask SlidingWindow(int32_t left, int32_t right) { return {left, right}; }

  friend constexpr bool operator==(const Mask& a, const Mask& b) {
    return a.left == b.left && a.right == b.right;
  }
};

// The parameters of attention that a request chooses. Spans of one launch may differ in them.
// Precision is none of them, because it selects the kernel (Geometry), nor is whether LSE is
// written, because that is an output.
struct Terms {
  Mask mask;
  float softmax_scale = 0;  // multiplies Q.K^T; finite, may be zero or negative

  // The score of a query row and a K/V row whose product Q.K^T is `dot`.
  template <typename Real>
  Real Score(Real dot) const {
    return dot * softmax_scale;
  }

  // The parameters that scores depend on, comparable: all but the mask.
  constexpr auto score_terms() const { return std::make_tuple(softmax_scale); }

  friend constexpr bool operator==(const Terms& a, const Terms& b) {
    return a.mask == b.mask && a.score_terms() == b.score_terms();
  }
};

// The keys and values of one span, dense (inline) or paged (resident). Row j of KV head h starts at
//
//   key + page(j / kPageTokens) * page_stride + h * head_stride + (j % kPageTokens) * row_stride
//
// where page(t) = pages ? pages[t] : t. V is addressed the same way, from `value`. Strides are in
// bytes; e = Geometry::kv_element_bytes().
//   dense NHD, K = [rows, kv_heads, head_dim]: row_stride = kv_heads * head_dim * e,
//       head_stride = head_dim * e, page_stride = 64 * row_stride
//   dense HND, K = [kv_heads, rows, head_dim]: row_stride = head_dim * e,
//       head_stride = rows * row_stride, page_stride = 64 * row_stride
//   paged, one page = [K, V][kv_heads][64][head_dim]: row_stride = head_dim * e,
//       head_stride = 64 * row_stride, value = key + kv_heads * head_stride, and page_stride is the
//       unit in which pages[] counts (it need not be the size of a page)
//   paged 8-bit: the same, but the 64 rows of a head are followed by their 64 scales, so
//       head_stride = 64 * (row_stride + 2), and the scale of row j is at
//       key + page(j / 64) * page_stride + h * head_stride + 64 * row_stride + (j % 64) * 2
struct KvView {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  const int32_t* pages = nullptr;  // [ceil(rows / kPageTokens)] in host memory; null for dense K/V
  int64_t page_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int32_t rows = 0;
  // The extent of the memory at `key` and `value` belongs here, for kernels that describe it to the
  // device (tensor maps).
};

// A part of the work of a span, for a launch that is one of several. Slice t * num_kv_heads + h is
// tile t of KV head h, where a tile is PlanOptions::tile_rows packed rows (plan.h).
struct SliceRange {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();

  bool Contains(int64_t slice) const { return begin <= slice && slice < end; }
};

// One span. Q and O have the same shape and strides; both hold elements of the batch's dtype.
// Element d of row i of query head h of Q starts at
// query + i * row_stride + h * head_stride + d * 2 bytes; head_dim elements are contiguous.
// CPU kernels need only the element's own alignment. CUDA kernels need every pointer and stride to
// be a multiple of 16 bytes (LSE: 4).
struct Span {
  const std::byte* query = nullptr;
  std::byte* output = nullptr;
  int64_t row_stride = 0;   // bytes
  int64_t head_stride = 0;  // bytes
  int32_t query_rows = 0;

  float* lse = nullptr;         // null: do not write LSE
  int64_t lse_row_stride = 0;   // elements
  int64_t lse_head_stride = 0;  // elements

  KvView kv;
  Terms terms;

  // The attention to compute. Other outputs are not written. A slice has the same bits in every
  // range.
  SliceRange slices;
};

// Common to every span of one launch. Requests with equal geometry can share a launch.
struct Geometry {
  DType dtype = DType::kFloat16;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_heads
  int32_t head_dim = 0;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Precision precision = Precision::k16Bit;  // anything else only with kInt8

  int32_t group() const { return num_heads / num_kv_heads; }
  size_t kv_element_bytes() const { return KvElementBytes(dtype, kv_dtype); }

  friend bool operator==(const Geometry& a, const Geometry& b) {
    return a.dtype == b.dtype && a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads &&
           a.head_dim == b.head_dim && a.kv_dtype == b.kv_dtype && a.precision == b.precision;
  }
};

// The spans of one launch, of one or more requests.
struct AttentionBatch {
  Geometry geometry;
  const Span* spans = nullptr;  // [num_spans]
  int32_t num_spans = 0;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ATTENTION_H_
