/* A CUDA driver without a GPU, for tests: libcuda.so.1. A program that links it, has loaded it by
 * its path, or finds it first in LD_LIBRARY_PATH, gets it where the clients load the driver.
 *
 * Memory of a GPU is that of the memfd whose descriptor is imported, so the server's side can map
 * it too, and the host can use its addresses. A stream is a thread that runs its operations in
 * order. Calls are checked as the driver does, or more strictly. Results are CUresult. */
#ifndef FLASHCORE_TESTS_CLIENT_FAKE_CUDA_FAKE_CUDA_H_
#define FLASHCORE_TESTS_CLIENT_FAKE_CUDA_FAKE_CUDA_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The driver's functions that tests use; the clients declare theirs. */
typedef struct CUstream_st* CUstream;
typedef struct CUctx_st* CUcontext;
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(CUcontext* context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(CUcontext context);
int cuCtxPopCurrent_v2(CUcontext* context);
int cuStreamCreate(CUstream* stream, unsigned flags); /* of the current context */
int cuStreamDestroy_v2(CUstream stream);              /* does not wait for its operations */
int cuStreamSynchronize(CUstream stream);
int cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data);

/* Bytes of device memory and addresses are multiples of it. */
enum { FAKE_CUDA_GRANULARITY = 65536 };

/* One GPU, of UUID "fake GPU no. 000", without managed memory, and no fault to come. */
void fake_cuda_reset(void);
/* At most 8 GPUs; 16 bytes of `uuids` for each. */
void fake_cuda_set_gpus(int count, const uint8_t* uuids);
/* The call of `function`, named without _v2, that comes after `calls` others fails with `result`.
 * There is one such fault at a time. */
void fake_cuda_fail(const char* function, int calls, int result);
/* How many of a kind are alive: "contexts" (retained), "current" (contexts, on all threads),
 * "imports", "reservations", "maps", "registrations" or "streams" (that were created). */
int fake_cuda_alive(const char* kind);
/* Whether memory of GPUs is said to be managed, which the host can use, too. */
void fake_cuda_manage(int managed);
/* Whether the stream is being captured. */
void fake_cuda_capture(CUstream stream, int capturing);

#ifdef __cplusplus
}
#endif

#endif /* FLASHCORE_TESTS_CLIENT_FAKE_CUDA_FAKE_CUDA_H_ */
