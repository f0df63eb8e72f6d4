// What flashcore-kernel-bench does about CUDA errors: a benchmark cannot go on after one.
#ifndef FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_
#define FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace flashcore::kernels {

// Ends the program with status 1 if `error` is one. `what` completes "cannot ...".
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "flashcore-kernel-bench: cannot %s: %s (%s)\n", what,
               cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(1);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_
