// Partial results of KV splits in the workspace: where a split leaves its unnormalised output,
// maximum and sum, and where the combine finds them.
#ifndef FLASHCORE_KERNELS_PARTIALS_H_
#define FLASHCORE_KERNELS_PARTIALS_H_

#include <cstdint>

namespace flashcore::kernels {

struct Partials {
  // `workspace` holds rows * (head_dim + 2) floats: outputs, then maxima, then sums.
  Partials(float* workspace, int32_t rows, int32_t output_head_dim)
      : output(workspace),
        max(workspace + int64_t{rows} * output_head_dim),
        sum(max + rows),
        head_dim(output_head_dim) {}

  float* OutputRow(int32_t row) const { return output + int64_t{row} * head_dim; }

  float* output;  // [rows][head_dim], relative to 2^max
  float* max;     // [rows], base 2; -infinity if the split's row saw nothing
  float* sum;     // [rows]
  int32_t head_dim;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PARTIALS_H_
