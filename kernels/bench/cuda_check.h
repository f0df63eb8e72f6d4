// What benchmarks of the CUDA kernels do about CUDA errors: they cannot go on after one.
#ifndef FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_
#define FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_

#include <cuda_runtime_api.h>
#include <errno.h>

#include <cstdio>
#include <cstdlib>

namespace flashcore::kernels {

// Ends the program with status 1 if `error` is one. `what` completes "cannot ...".
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: cannot %s: %s (%s)\n", program_invocation_short_name, what,
               cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(1);
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_CUDA_CHECK_H_
