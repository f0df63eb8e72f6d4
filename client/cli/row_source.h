// Rows of Q, K and V that are made again when they are needed instead of being kept.
#ifndef FLASHCORE_CLIENT_CLI_ROW_SOURCE_H_
#define FLASHCORE_CLIENT_CLI_ROW_SOURCE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "client/cpp/attend.h"

namespace flashcore::cli {

enum class Tensor : uint8_t { kQuery, kKey, kValue };

// The content of one sequence: a function of seed, tensor, row and head. Sequences with the same
// prefix seed have their first `prefix_rows` rows in common. Immutable: thread-safe.
class RowSource {
 public:
  RowSource(DType dtype, uint32_t head_dim, uint64_t seed, uint64_t prefix_rows = 0,
            uint64_t prefix_seed = 0);

  // Rows [first, first + rows) of heads [0, heads) in `layout`; out has rows * heads * head_dim
  // elements. They are random in sign and, from 1/2 to 1, in magnitude.
  void Fill(Tensor tensor, uint64_t first, uint64_t rows, uint32_t heads, Layout layout,
            absl::Span<uint16_t> out) const;

  // The same of one head: [rows, head_dim].
  void FillHead(Tensor tensor, uint64_t first, uint64_t rows, uint32_t head,
                absl::Span<uint16_t> out) const;

 private:
  void FillRow(Tensor tensor, uint64_t row, uint32_t head, uint16_t* out) const;

  const uint32_t head_dim_;
  const uint64_t seed_;
  const uint64_t prefix_rows_;
  const uint64_t prefix_seed_;
  const uint16_t random_bits_;  // of an element: sign and mantissa
  const uint16_t exponent_;     // of the numbers from 1/2 to 1
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_ROW_SOURCE_H_
