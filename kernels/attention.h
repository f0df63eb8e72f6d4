// The seam between the server and every attention kernel, on any device.
//
// A batch is a ragged list of spans. One span is one sequence's share of a request: its query rows
// and the K/V they attend to. For each span, query head h, and query row i:
//
//   O[i, h] = sum_j softmax_j(scale * Q[i, h] . K[j, h / group]) * V[j, h / group]
//   LSE[i, h] = log(sum_j exp(scale * Q[i, h] . K[j, h / group]))          (natural logarithm)
//
// over the K/V rows j that the mask lets row i see, where group = num_heads / num_kv_heads
// (grouped-query attention: consecutive query heads share one KV head). A query row that sees no
// K/V row gets O = 0 and LSE = -infinity.
//
// Nothing here owns memory and nothing here is checked: the server validates a request before it
// becomes a span. This header includes neither CUDA nor gRPC, so it can be included anywhere.
#ifndef FLASHCORE_KERNELS_ATTENTION_H_
#define FLASHCORE_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <limits>

namespace flashcore::kernels {

// Tokens in one K/V page. It is also the KV tile of every kernel, so that paging costs one index
// per tile.
inline constexpr int kPageTokens = 64;

// Pages that hold `rows` K/V rows.
inline constexpr int32_t PagesFor(int32_t rows) { return (rows + kPageTokens - 1) / kPageTokens; }

enum class DType : uint8_t { kFloat16, kBFloat16 };

inline constexpr size_t DTypeBytes(DType) { return 2; }

// What K and V elements are. FP8 ones are E4M3 bytes (kernels/fp8.h) that stand for
// scale[kv_head] * E4M3, with scales of their own for K and V.
enum class KvDType : uint8_t { kSameAsQuery, kFloat8E4M3 };

inline constexpr size_t KvElementBytes(DType dtype, KvDType kv_dtype) {
  return kv_dtype == KvDType::kFloat8E4M3 ? 1 : DTypeBytes(dtype);
}

// Type in which Q.K^T and P.V are summed.
enum class Accumulate : uint8_t { kFloat32, kFloat16 };

// Which K/V rows a query row sees. Row i of a span sits at position p = i + kv_rows - query_rows
// (the last query row is aligned with the last K/V row: "bottom right") and sees the K/V rows j
// with p - left <= j <= p + right. kUnbounded lifts a side.
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

// The keys and values of one span, dense (inline) or paged (resident). Row j of KV head h starts at
//
//   key + page(j / kPageTokens) * page_stride + h * head_stride + (j % kPageTokens) * row_stride
//
// and likewise from `value`, where page(t) = pages ? pages[t] : t. Strides are in bytes, of which
// an element has e = Geometry::kv_element_bytes().
//   dense NHD, K = [rows, kv_heads, head_dim]: row_stride = kv_heads * head_dim * e,
//       head_stride = head_dim * e, page_stride = 64 * row_stride
//   dense HND, K = [kv_heads, rows, head_dim]: row_stride = head_dim * e,
//       head_stride = rows * row_stride, page_stride = 64 * row_stride
//   paged, one page = [K, V][kv_heads][64][head_dim]: row_stride = head_dim * e,
//       head_stride = 64 * row_stride, value = key + kv_heads * head_stride, and page_stride is the
//       unit in which pages[] counts (it need not be the size of a page)
struct KvView {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  const int32_t* pages = nullptr;  // [ceil(rows / kPageTokens)], or null for dense K/V
  int64_t page_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int32_t rows = 0;
  const float* key_scale = nullptr;    // [kv_heads], finite and positive; of FP8 K/V only
  const float* value_scale = nullptr;  // [kv_heads], likewise
};

// One span. Q and O have the same shape and strides; both hold elements of the batch's dtype.
// Element d of row i of query head h of Q starts at
// query + i * row_stride + h * head_stride + d * 2 bytes; head_dim elements are contiguous.
// No alignment beyond the element's is promised on the CPU; CUDA kernels need 16-byte alignment of
// every pointer and stride (LSE and scales: 4-byte).
struct Span {
  const std::byte* query = nullptr;
  std::byte* output = nullptr;
  int64_t row_stride = 0;   // bytes
  int64_t head_stride = 0;  // bytes
  int32_t query_rows = 0;

  float* lse = nullptr;         // null: not wanted
  int64_t lse_row_stride = 0;   // elements
  int64_t lse_head_stride = 0;  // elements

  KvView kv;
  Mask mask;
  float softmax_scale = 0;  // multiplies Q.K^T; finite, may be zero or negative
};

// What every span of one launch has in common: requests that share it can share a launch.
struct Geometry {
  DType dtype = DType::kFloat16;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_heads
  int32_t head_dim = 0;
  KvDType kv_dtype = KvDType::kSameAsQuery;

  int32_t group() const { return num_heads / num_kv_heads; }
  size_t kv_element_bytes() const { return KvElementBytes(dtype, kv_dtype); }

  friend bool operator==(const Geometry& a, const Geometry& b) {
    return a.dtype == b.dtype && a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads &&
           a.head_dim == b.head_dim && a.kv_dtype == b.kv_dtype;
  }
};

// The requests that one launch serves.
struct AttentionBatch {
  Geometry geometry;
  const Span* spans = nullptr;  // [num_spans]
  int32_t num_spans = 0;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ATTENTION_H_
