// Answers of a server against the float64 reference. Functions are pure.
#ifndef FLASHCORE_CLIENT_CLI_ORACLE_H_
#define FLASHCORE_CLIENT_CLI_ORACLE_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/attend.h"
#include "kernels/attention.h"

namespace flashcore::cli {

// A request whose spans are all inline, as the kernels see it. The pointers are into the request's
// tensors: `output` and `lse` are the answer of the server.
struct KernelBatch {
  kernels::Geometry geometry;
  std::vector<kernels::Span> spans;

  kernels::AttentionBatch view() const {
    return {geometry, spans.data(), static_cast<int32_t>(spans.size())};
  }
};
KernelBatch ToKernelBatch(const AttendRequest& request);

// Of span `index`, the heads that one KV head serves, over other K/V: [rows, head_dim] of that
// head. The result points into `key` and `value`.
KernelBatch OneKvHead(const KernelBatch& batch, size_t index, int32_t kv_head,
                      absl::Span<const uint16_t> key, absl::Span<const uint16_t> value);

// Of every span, `rows_per_span` query rows, the first and the last among them, each as a span of
// its own over just the K/V rows it sees: a spot check whose cost does not grow with query rows.
KernelBatch SpotCheckBatch(const KernelBatch& whole, uint32_t rows_per_span);

// Whether a few rows of every span are about as exact as unfused attention: what a load checks of
// its answers. Looser than verify, as precision is not what it measures.
bool SpotCheck(const KernelBatch& answered);

// Largest absolute errors against float64. An element that is not finite where it should be, or
// that is finite where the reference is not (LSE of a row that sees nothing), is an infinite error.
struct Errors {
  double server = 0;      // of the server's O
  double unfused = 0;     // of the O of unfused attention at the same precision
  double server_lse = 0;  // of the server's LSE; 0 if it was not asked for
  double unfused_lse = 0;

  // Both errors 0 make it 1.
  double Ratio() const;
  // Whether O, and LSE, are within `factor` times the error of unfused attention. No result in the
  // dtype has less than the rounding error of the reference, so unfused attention cannot set an
  // impossible bound for O. LSE is float32: it gets as its least bound `lse_floor`.
  bool Within(double factor) const;
  // Whether O, and LSE, are within `bound`.
  bool WithinBound(double bound) const { return server <= bound && server_lse <= bound; }
  double lse_floor = 0;  // 1e-5 of the largest finite |LSE|, at least 1e-5
};
Errors Compare(const KernelBatch& answered);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_ORACLE_H_
