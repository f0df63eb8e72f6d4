// Compares replies of a server with the float64 reference. Functions are pure.
#ifndef FLASHCORE_CLIENT_CLI_ORACLE_H_
#define FLASHCORE_CLIENT_CLI_ORACLE_H_

#include <cstdint>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/attend.h"
#include "kernels/attention.h"

namespace flashcore::cli {

// The bits of NaN in either dtype.
inline constexpr uint16_t kNanBits = 0x7fff;

kernels::DType ToKernel(DType dtype);
absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements);

// A request with random inputs. Owns Q, K, V, O and LSE. Not copyable: the request points into it.
class RandomRequest {
 public:
  // Takes shapes, dtype, layout and mask from `shape`. Elements of Q, K and V are uniform in
  // [-magnitude, magnitude]; O and LSE are NaN.
  RandomRequest(const AttendRequest& shape, bool want_lse, float magnitude,
                std::mt19937_64* random);
  RandomRequest(const RandomRequest&) = delete;
  RandomRequest& operator=(const RandomRequest&) = delete;

  AttendRequest& request() { return request_; }
  std::vector<uint16_t>& output() { return output_; }

 private:
  AttendRequest request_;
  std::vector<uint16_t> query_, key_, value_, output_;
  std::vector<float> lse_;
};

// A request with inline K/V as the kernels see it. Its pointers are into the request's tensors;
// `output` and `lse` are the server's reply.
struct KernelBatch {
  kernels::Geometry geometry;
  std::vector<kernels::Span> spans;

  kernels::AttentionBatch view() const {
    return {geometry, spans.data(), static_cast<int32_t>(spans.size())};
  }
};
KernelBatch ToKernelBatch(const AttendRequest& request);

// The query heads of span `index` that share one KV head, over other K/V: [rows, head_dim] of that
// head. The result points into `key` and `value`.
KernelBatch OneKvHead(const KernelBatch& batch, size_t index, int32_t kv_head,
                      absl::Span<const uint16_t> key, absl::Span<const uint16_t> value);

// `rows_per_span` query rows of every span, the first and the last among them. Each becomes a span
// over only the K/V rows that it sees, so the cost of a check does not grow with the query rows.
KernelBatch SpotCheckBatch(const KernelBatch& whole, uint32_t rows_per_span);

// Whether a few rows of every span are about as exact as unfused attention. Looser than verify: for
// loads, which do not measure precision.
bool SpotCheck(const KernelBatch& reply);

// Largest absolute errors against float64. The error is infinite where only one of result and
// reference is finite (the LSE of a row that sees nothing is -infinity).
struct Errors {
  double server = 0;      // of the server's O
  double unfused = 0;     // of the O of unfused attention at the same precision
  double server_lse = 0;  // of the server's LSE; 0 if not requested
  double unfused_lse = 0;

  // 1 if both are 0.
  double Ratio() const { return server == 0 && unfused == 0 ? 1 : server / unfused; }
  // Whether O, and LSE, are within `factor` times the error of unfused attention. For O that is
  // always possible: unfused attention has at least the rounding error of the dtype. LSE is
  // float32, and its bound is at least `lse_floor`.
  bool Within(double factor) const;
  // Whether O, and LSE, are within `bound`.
  bool WithinBound(double bound) const { return server <= bound && server_lse <= bound; }
  double lse_floor = 0;  // 1e-5 of the largest finite |LSE|, at least 1e-5
};
Errors Compare(const KernelBatch& reply);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_ORACLE_H_
