/* The C interface of FlashCore's local socket, for other languages: libflashcore_c.so.
 *
 * Messages are serialized protobuf messages of flashcore/v1/attention.proto. Tensors lie in memory
 * that flashcore_register_memory gives, and requests name their places as MemoryRange: its
 * region_id, the offset, and the bytes of the tensor. The library makes every memory fence and
 * every system call that the protocol needs.
 *
 * A decode step, with errors left out:
 *
 *   flashcore_connect("local:/run/flashcore/local.sock", "example", NULL, &client);
 *   flashcore_register_memory(client, bytes, 0, timeout_ns, &memory);
 *   flashcore_call(client, "CreateSequence", request, size, timeout_ns, &response);
 *   for each step: write Q, K and V into memory.data;
 *     flashcore_submit(client, tag, attend_request, size, timeout_ns);
 *     flashcore_wait(client, timeout_ns, &completion);   read O from memory.data
 *   flashcore_close(client);
 *
 * A frontend on the server's GPU leaves its tensors there, in memory of
 * flashcore_allocate_device_memory, and submits its layers ahead in the order of its CUDA stream:
 * see flashcore_submit_on_stream. The host then waits for no layer, and receives completions when
 * it likes.
 *
 * Functions return FLASHCORE_OK, FLASHCORE_AGAIN, or a status code of gRPC above 0; then
 * flashcore_last_error has the text. Codes that the library itself gives: INVALID_ARGUMENT (3) for
 * arguments that make no sense, DEADLINE_EXCEEDED (4), RESOURCE_EXHAUSTED (8) without memory or
 * over a limit, UNIMPLEMENTED (12) without the driver of a GPU, INTERNAL (13) for errors of that
 * driver, UNAVAILABLE (14) once the connection has ended: close the client and connect again;
 * memory and requests in flight are gone, sequences live on unless the server was restarted.
 *
 * Timeouts are nanoseconds; negative, or more than a year: none. With 0 nothing is sent:
 * DEADLINE_EXCEEDED; flashcore_wait looks once. All functions are thread-safe, except that a client
 * is closed when no other function runs on it. A completion belongs to one thread's next poll or
 * wait: let one thread of a client receive.
 *
 * A client belongs to the process that made it. In a child that was forked, functions return
 * FAILED_PRECONDITION (9), and flashcore_close leaves alone what is the parent's: connect after the
 * fork.
 */
#ifndef FLASHCORE_C_H_
#define FLASHCORE_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASHCORE_API __attribute__((visibility("default")))

enum {
  FLASHCORE_OK = 0,
  FLASHCORE_AGAIN = -1 /* submit: the ring is full; poll, wait: there is no completion */
};

/* One connection with one ring. */
typedef struct flashcore_client flashcore_client;

typedef struct flashcore_options {
  uint32_t slots;      /* requests in flight at most: a power of two, 1 to 4096; 0: 64 */
  uint32_t slot_bytes; /* of a slot: a multiple of 64, 256 to 1048576; 0: 16384 */
  int64_t timeout_ns;  /* of connecting */
  uint32_t spin_us;    /* how long flashcore_wait polls before it sleeps */
} flashcore_options;

/* Memory that both sides map; zero at first. */
typedef struct flashcore_memory {
  void* data;            /* page-aligned */
  uint64_t bytes;        /* whole pages, at least what was asked for */
  uint8_t region_id[16]; /* for MemoryRange.region_id; offsets are multiples of 16 */
} flashcore_memory;

/* Memory of a GPU that both sides map; zero at first. */
typedef struct flashcore_device_memory {
  uint64_t address;      /* a CUdeviceptr, in the primary context of the GPU, as of cudaMalloc */
  uint64_t bytes;        /* at least what was asked for */
  int32_t ordinal;       /* of the GPU in this process, as of cudaGetDevice */
  uint8_t region_id[16]; /* as of flashcore_memory */
} flashcore_device_memory;

/* A serialized response, to be given to flashcore_free. */
typedef struct flashcore_bytes {
  uint8_t* data; /* null if empty */
  uint64_t size;
} flashcore_bytes;

typedef struct flashcore_completion {
  uint64_t tag;
  const uint8_t* response; /* AttendResponse, until the next poll or wait; see its `status` */
  uint64_t response_bytes;
} flashcore_completion;

/* `target` is "local:/path". `name` is for the server's log; may be null. `options` null: defaults,
 * with a timeout of 30 s and 50 us of polling. On an error *client is null. */
FLASHCORE_API int flashcore_connect(const char* target, const char* name,
                                    const flashcore_options* options, flashcore_client** client);

/* Cancels what is in flight and unmaps all memory of the client: streams that wait for results go
 * on, and no work of a GPU may use the memory any more. After flashcore_submit_on_stream it waits
 * for the GPU, as cudaFree does. Null does nothing. */
FLASHCORE_API void flashcore_close(flashcore_client* client);

/* Ends the connection, from any thread: functions that run on the client return CANCELLED (1), and
 * later ones, too. Streams that wait for results go on. Memory stays mapped until
 * flashcore_close. */
FLASHCORE_API void flashcore_shutdown(flashcore_client* client);

/* 1 once the connection has ended, else 0. */
FLASHCORE_API int flashcore_ended(const flashcore_client* client);

/* "uid:NUMBER", as the server knows this process; valid until the client is closed. */
FLASHCORE_API const char* flashcore_identity(const flashcore_client* client);

/* With read_only, it is for inputs only. */
FLASHCORE_API int flashcore_register_memory(flashcore_client* client, uint64_t bytes, int read_only,
                                            int64_t timeout_ns, flashcore_memory* memory);

/* Memory of the GPU on which the server has `device_id` (SequenceInfo.device_id); null or empty:
 * its first device. UNIMPLEMENTED (12) if the server does not share memory of a GPU, or if there is
 * no driver here; FAILED_PRECONDITION (9) if this process does not see that GPU. */
FLASHCORE_API int flashcore_allocate_device_memory(flashcore_client* client, uint64_t bytes,
                                                   const char* device_id, int64_t timeout_ns,
                                                   flashcore_device_memory* memory);

/* Unmaps memory of either kind; requests that use it must have been answered, and no work of a GPU
 * may use it. NOT_FOUND (5) if it is unknown. */
FLASHCORE_API int flashcore_unregister_memory(flashcore_client* client,
                                              const uint8_t region_id[16]);

/* A unary RPC of AttentionService, e.g. "GetServerInfo"; messages of at most 1 MiB less some bytes.
 * A LoadSequence is one message, with its rows in registered memory. */
FLASHCORE_API int flashcore_call(flashcore_client* client, const char* method, const void* request,
                                 uint64_t request_bytes, int64_t timeout_ns,
                                 flashcore_bytes* response);
FLASHCORE_API void flashcore_free(flashcore_bytes* bytes);

/* Submits a serialized AttendRequest with output_range, and lse_range if it wants the LSE. Does not
 * wait: FLASHCORE_AGAIN if all slots are unanswered. A request that takes effect is answered
 * exactly once, with its tag, unless the connection ends. RESOURCE_EXHAUSTED (8) if it does not fit
 * in a slot: use flashcore_call. */
FLASHCORE_API int flashcore_submit(flashcore_client* client, uint64_t tag, const void* request,
                                   uint64_t request_bytes, int64_t timeout_ns);

/* The same in the order of `stream`, a CUstream or cudaStream_t: the request begins when the work
 * before it in the stream is done, and work that is enqueued later finds its results. So inputs are
 * written, and O and LSE read, on the stream, without the host waiting for it. `request` has no
 * inputs_ready and no results_ready: the library appends them, 70 bytes of the slot at most.
 *
 * The stream goes on also if the request fails, or the connection ends: the results are then
 * unspecified, and the completion, or the end of the connection, says so. If this function fails,
 * nothing is submitted, and the stream does not wait. Its first call of a client asks the server,
 * within the timeout, for the memory of the counters that the stream and the server share.
 *
 * RESOURCE_EXHAUSTED (8) also if requests of 64 other streams of the client are unfinished.
 * FAILED_PRECONDITION (9) if the stream is being captured into a graph; or for the default stream
 * (0) without a current context. The call blocks while the stream has no room for more work, as a
 * launch does. */
FLASHCORE_API int flashcore_submit_on_stream(flashcore_client* client, uint64_t tag,
                                             const void* request, uint64_t request_bytes,
                                             int64_t timeout_ns, void* stream);

/* Takes one completion, in the order of the answers; FLASHCORE_AGAIN if there is none, for wait:
 * within the timeout. */
FLASHCORE_API int flashcore_poll(flashcore_client* client, flashcore_completion* completion);
FLASHCORE_API int flashcore_wait(flashcore_client* client, int64_t timeout_ns,
                                 flashcore_completion* completion);

/* For event loops: *fd is readable while flashcore_poll has a completion, or an error because the
 * connection has ended. It belongs to the client: only wait for it. From the first call on, a
 * thread of the library receives, and flashcore_wait is FAILED_PRECONDITION (9). */
FLASHCORE_API int flashcore_event_fd(flashcore_client* client, int* fd);

/* Asks for the cancellation of the requests with this tag. Their completions still come. */
FLASHCORE_API int flashcore_cancel(flashcore_client* client, uint64_t tag);

/* The text of the last error of this thread; empty if there was none. Until its next error. */
FLASHCORE_API const char* flashcore_last_error(void);

/* The same as a serialized Status, with the details that the server gave. `size`: of it in bytes.
 */
FLASHCORE_API const uint8_t* flashcore_last_status(uint64_t* size);

#ifdef __cplusplus
}
#endif

#endif /* FLASHCORE_C_H_ */
