// An Attend request and its result, over memory of the caller. The mathematics, the layouts and the
// meaning of every field are those of proto/flashcore/v1/attention.proto.
//
// Plain data: not thread-safe, nothing here owns a tensor.
#ifndef FLASHCORE_ATTEND_H_
#define FLASHCORE_ATTEND_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace flashcore {

inline constexpr size_t kElementBytes = 2;  // of either DType

// Element type of Q, K, V and O, 2 bytes each: IEEE 754 binary16, or the upper half of binary32.
enum class DType : uint8_t { kFloat16, kBFloat16 };

// How a sequence stores its K/V: as it comes, or rounded to 8 bits, each row of each KV head with a
// scale of its own (half the memory; KvDType of proto/flashcore/v1/attention.proto says how). Rows
// are sent, and O is returned, as its DType in any case.
enum class KvDType : uint8_t { kSameAsQuery, kInt8, kFloat8E4M3 };

// The least precise products that a request accepts over sequences with KvDType::kInt8: of
// elements, or of INT8 codes in Q K^T, or in P V as well (Precision of
// proto/flashcore/v1/attention.proto says how they round). The answer may be more precise; over
// other K/V it is.
enum class Precision : uint8_t { k16Bit, kInt8Qk, kInt8QkPv };

// Order of the axes of a span's tensors.
enum class Layout : uint8_t {
  kNHD,  // [rows, heads, head_dim]; LSE [rows, heads]. FlashAttention's.
  kHND,  // [heads, rows, head_dim]; LSE [heads, rows]. PyTorch SDPA's.
};

// Which K/V rows a query row sees. Row i of n query rows over m K/V rows sits at p = i + m - n.
struct Mask {
  enum class Kind : uint8_t {
    kNone,           // sees every row
    kCausal,         // sees j <= p
    kSlidingWindow,  // sees p - left <= j <= p + right; an unset side has no bound
  };
  Kind kind = Kind::kNone;
  std::optional<int32_t> left;   // rows, not negative; only with kSlidingWindow
  std::optional<int32_t> right;  // rows, not negative; only with kSlidingWindow

  static Mask None() { return {}; }
  static Mask Causal() { return {Kind::kCausal, std::nullopt, std::nullopt}; }
  static Mask SlidingWindow(std::optional<int32_t> left, std::optional<int32_t> right) {
    return {Kind::kSlidingWindow, left, right};
  }
};

// One sequence's share of a request.
struct SpanShape {
  uint32_t query_rows = 0;  // at least 1
  // Inline: the rows to attend to. With sequence_id: the rows to append before attending.
  uint32_t kv_rows = 0;
  std::string sequence_id = {};  // empty: K/V comes inline
  // Only with sequence_id: the length the sequence must have, else FAILED_PRECONDITION.
  std::optional<uint64_t> expected_length = {};
};

struct AttendRequest {
  // Comes back in the result. In an AttendStream it must be set, and unique among those in flight.
  std::string request_id;
  std::vector<SpanShape> spans;
  DType dtype = DType::kFloat16;
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;  // divides num_heads
  uint32_t head_dim = 0;
  Layout layout = Layout::kNHD;
  Mask mask;
  std::optional<float> softmax_scale;  // unset: 1 / sqrt(head_dim)
  Precision precision = Precision::k16Bit;
  uint32_t layer = 0;

  // Owned by the caller. Elements are little-endian, spans are packed one after the other, and no
  // alignment is required. Do not change Q, K and V until the call that takes the request returns:
  // Attend sends from this memory, AttendAsync and Send copy it. Tensors in SharedMemory and
  // DeviceMemory of this Client must not change until the result is there. Those in DeviceMemory
  // are written before the call, unless it is AttendOnCudaStream; elsewhere on a GPU they are
  // INVALID_ARGUMENT. Sizes: QueryBytes(), KvBytes(), KvBytes().
  absl::Span<const std::byte> query;
  absl::Span<const std::byte> key;
  absl::Span<const std::byte> value;

  // Owned by the caller, who keeps them alive and does not touch them until the call returns or its
  // callback runs. After an error their content is unspecified.
  absl::Span<std::byte> output;  // O, shaped as Q: QueryBytes()
  absl::Span<float> lse;         // LseElements(), natural log; empty: not requested

  // Sizes that follow from spans, heads and head_dim; meaningful once CheckRequest is OK.
  size_t QueryBytes() const;
  size_t KvBytes() const;  // of `key`, and of `value`
  size_t LseElements() const;

  // True if it is safe to send the request twice: all its K/V is inline, or each sequence it names
  // has an expected_length.
  bool SafeToRepeat() const;
};

// INVALID_ARGUMENT, naming field, size and what is allowed, if the byte counts of the tensors, the
// output or the LSE do not match the shapes, or a shape is impossible (zero, overflow, heads that
// do not divide). The server checks its own limits (head_dims, rows, spans).
absl::Status CheckRequest(const AttendRequest& request);

// Nanoseconds that the request spent in each phase, on the server's clock. In order.
struct Timing {
  uint64_t receive_ns = 0;
  uint64_t staging_wait_ns = 0;
  uint64_t queue_ns = 0;
  uint64_t copy_in_ns = 0;
  uint64_t kernel_ns = 0;
  uint64_t copy_out_ns = 0;
};

// The result apart from O and LSE.
struct AttendResult {
  std::string request_id;
  Timing timing;
  // Rows after the append, [spans], 0 for a span with inline K/V; empty if all K/V was inline.
  std::vector<uint64_t> sequence_lengths;
  size_t request_bytes = 0;   // of the message sent
  size_t response_bytes = 0;  // of the message received
  int attempts = 0;           // 1: no retry was needed
};

}  // namespace flashcore

#endif  // FLASHCORE_ATTEND_H_
