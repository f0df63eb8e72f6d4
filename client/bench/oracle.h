// Compares replies of a server with the float64 reference. Functions are pure.
#ifndef FLASHCORE_CLIENT_BENCH_ORACLE_H_
#define FLASHCORE_CLIENT_BENCH_ORACLE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "flashcore/attend.h"
#include "kernels/attention.h"

namespace flashcore::cli {

// The bits of NaN in either dtype.
inline constexpr uint16_t kNanBits = 0x7fff;

kernels::DType ToKernel(DType dtype);
kernels::KvDType ToKernel(KvDType kv_dtype);
kernels::Precision ToKernel(Precision precision);
absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements);
// The bits of element d of a row of 16-bit elements.
uint16_t ElementAt(const std::byte* row, int32_t d);

// The K/V rows [first, last] that query row `row` of a span sees; none if last < first. Not the
// server's VisibleKv, which this checks.
struct VisibleRows {
  int64_t first = 0;
  int64_t last = 0;
};
VisibleRows VisibleTo(const kernels::Span& span, int64_t row);

// A request with random inputs. Owns Q, K, V, O and LSE. Not copyable: the request points into it.
class RandomRequest {
 public:
  // Takes shapes, dtype, layout and mask from `shape`. Elements of Q, K and V are uniform in
  // [-magnitude, magnitude]; O and LSE are NaN. The first `shared_rows` K/V rows of all spans are
  // the same; no span has fewer.
  RandomRequest(const AttendRequest& shape, bool want_lse, float magnitude, std::mt19937_64* random,
                uint32_t shared_rows = 0);
  RandomRequest(RandomRequest&&) = delete;
  RandomRequest& operator=(RandomRequest&&) = delete;

  AttendRequest& request() { return request_; }
  std::vector<uint16_t>& output() { return output_; }
  const std::vector<uint16_t>& key() const { return key_; }
  const std::vector<uint16_t>& value() const { return value_; }

 private:
  AttendRequest request_;
  std::vector<uint16_t> query_, key_, value_, output_;
  std::vector<float> lse_;
};

// Rows [first, last) of K, or V, of span `index` of a request whose K/V is inline, in its layout.
std::vector<uint16_t> KvRows(const AttendRequest& request, const std::vector<uint16_t>& tensor,
                             size_t index, uint64_t first, uint64_t last);

// A request with inline K/V as the kernels see it. Its pointers are into the request's tensors;
// `output` and `lse` are the server's reply.
struct KernelBatch {
  kernels::Geometry geometry;
  std::vector<kernels::Span> spans;
  // K/V that is not the request's, in place of it.
  struct Pages;
  std::vector<std::shared_ptr<const Pages>> pages = {};

  kernels::AttentionBatch view() const {
    return {geometry, spans.data(), static_cast<int32_t>(spans.size())};
  }
};
KernelBatch ToKernelBatch(const AttendRequest& request);

// The query heads of span `index` that share one KV head, over other K/V: [rows, head_dim] of that
// head. The result points into `key` and `value`.
KernelBatch OneKvHead(const KernelBatch& batch, size_t index, int32_t kv_head,
                      absl::Span<const uint16_t> key, absl::Span<const uint16_t> value);

// The batch over the same K/V as a server stores it in sequences of this `kv_dtype`, of a request
// that accepts this `precision`.
KernelBatch AsStored(KernelBatch batch, KvDType kv_dtype, Precision precision = Precision::k16Bit);

// `rows_per_span` query rows of every span, the first and the last among them. Each becomes a span
// over only the K/V rows that it sees, so the cost of a check does not grow with the query rows.
KernelBatch SpotCheckBatch(const KernelBatch& whole, uint32_t rows_per_span);

// Whether a few rows of every span are about as exact as unfused attention. Looser than verify: for
// loads, which do not measure precision.
bool SpotCheck(const KernelBatch& reply);

// Errors against float64: the largest absolute error, and the root of the mean square (RMS). An
// error is infinite where only one of result and reference is finite (the LSE of a row that sees
// nothing is -infinity).
struct Errors {
  double server = 0;  // of the server's O
  double server_rms = 0;
  double unfused = 0;  // of the O of unfused attention at the same precision
  double unfused_rms = 0;
  double server_lse = 0;  // of the server's LSE; 0 if not requested
  double unfused_lse = 0;
  double lse_floor = 0;      // 1e-5 of the largest finite |LSE|, at least 1e-5
  double largest_value = 0;  // |V|
  double rounding = 0;       // of the largest |O| of the reference to the dtype, at most
  double output_rms = 0;     // of the reference
  // Bounds on what products of INT8 codes add, if the batch accepts them: see ProductErrors. 0 if
  // it does not.
  double products = 0;
  double products_rms = 0;
  double products_lse = 0;

  // The server's errors over those of unfused attention and of products; 1 if both are 0.
  double Ratio() const { return server == 0 && unfused == 0 ? 1 : server / (unfused + products); }
  double RmsRatio() const {
    return server_rms == 0 && unfused_rms == 0 ? 1 : server_rms / (unfused_rms + products_rms);
  }
  // Whether O, and LSE, are within `factor` times the errors of unfused attention, plus one
  // rounding of O: where O has few elements, the largest error of either may be lucky. The RMS
  // shows one row lost of thousands, which moves no element by more than rounding may. To all of
  // them comes what products of codes add.
  //
  // Unfused attention rounds scores, so with large scores its errors are as large as V and excuse
  // anything. Therefore O must also be within 2^-7 of the largest |V| (rounding the probabilities
  // and O to BF16 costs at most 2^-8), and LSE within 2^-7. LSE is float32; its bound is at least
  // `lse_floor`.
  bool Within(double factor) const;
  // Whether O, and LSE, are within `bound`, and the RMS error of O is within `relative` times the
  // RMS of O. The latter notices what is lost where O is small, as over many rows.
  bool WithinBound(double bound, double relative) const {
    return server <= bound && server_lse <= bound && server_rms <= relative * output_rms;
  }
};
Errors Compare(const KernelBatch& reply);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_ORACLE_H_
