// Requests with random inputs, and replies of a server as the oracle takes them. Functions are
// pure.
#ifndef FLASHCORE_CLIENT_BENCH_REPLY_CHECK_H_
#define FLASHCORE_CLIENT_BENCH_REPLY_CHECK_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "flashcore/attend.h"
#include "kernels/attention.h"
#include "kernels/oracle/errors.h"

namespace flashcore::cli {

// The bits of NaN in either dtype.
inline constexpr uint16_t kNanBits = 0x7fff;

kernels::DType ToKernel(DType dtype);
kernels::KvDType ToKernel(KvDType kv_dtype);
kernels::Precision ToKernel(Precision precision);
absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements);

// The K/V rows that query row `row` of a span sees. Neither the server's VisibleKv nor the oracle's
// view: this checks both.
kernels::KvRange VisibleTo(const kernels::Span& span, int32_t row);

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

// The errors of a reply, by VisibleTo.
using kernels::Errors;
Errors Compare(const KernelBatch& reply);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_REPLY_CHECK_H_
