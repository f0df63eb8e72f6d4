// The C++ client of FlashCore: attention over gRPC, or over the local socket of a server on the
// same host, on memory of the caller. client/README.md has examples of every call.
//
// K/V that stays on the server is a Sequence, from CreateSequence or OpenSequence (sequence.h). A
// request over many sequences names them in spans[i].sequence_id.
//
// Errors are the status codes of the contract (attention.proto), with the server's message;
// GetErrorInfo (error_info.h) tells causes of one code apart. The client itself adds
// INVALID_ARGUMENT for byte counts that do not match the shapes (nothing is sent),
// RESOURCE_EXHAUSTED for a message over its own limit, UNAVAILABLE when the server cannot be
// reached, and INTERNAL for a reply that does not match the request.
//
// A Client and all that it made belong to their process. In a child that was forked each call is
// FAILED_PRECONDITION (WaitForConnected and Receive: false), and destructors leave alone what is
// the parent's. A child connects anew; over gRPC only if its parent has made no Client over gRPC.
#ifndef FLASHCORE_CLIENT_H_
#define FLASHCORE_CLIENT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "flashcore/attend.h"
#include "flashcore/attend_stream.h"
#include "flashcore/device_memory.h"
#include "flashcore/error_info.h"
#include "flashcore/options.h"
#include "flashcore/sequence.h"
#include "flashcore/shared_memory.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

namespace client {
class Attempts;
}

// Cancels an AttendAsync or AttendOnCudaStream. A copy refers to the same call; dropping it does
// nothing. Thread-safe.
class CallHandle {
 public:
  CallHandle() = default;

  // The callback then runs with CANCELLED, unless the call has ended already.
  void Cancel();

 private:
  friend class Client;
  explicit CallHandle(std::weak_ptr<class AttendCall> call) : call_(std::move(call)) {}

  std::weak_ptr<class AttendCall> call_;
};

enum class HealthStatus { kUnknown, kServing, kNotServing };

// One connection to one server. Thread-safe; calls share the connection. A Client may be destroyed
// while its calls and streams are in flight: they still complete. When a connection with requests
// on CUDA streams goes, here or before the next one is made, it waits for the work of these
// streams, as cudaFree does.
class Client {
 public:
  using AttendCallback = std::function<void(absl::Status, AttendResult)>;

  // `target` is "host:port", "unix:path", a gRPC target URI, or "local:/path", the socket of a
  // server's --local_listen. INVALID_ARGUMENT if it is none of them, or if a local target has
  // options for tokens or TLS. Does not connect: the first call does.
  static absl::StatusOr<std::unique_ptr<Client>> Create(absl::string_view target,
                                                        ClientOptions options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Blocks. On OK, output and lse of the request are written; `result` may be null.
  absl::Status Attend(const AttendRequest& request, AttendResult* result,
                      const CallOptions& call = {});

  // `done` runs exactly once: on a thread of the library, or on this one before AttendAsync returns
  // if nothing could be sent. It must not block. Output and lse must live until then; the rest is
  // copied.
  CallHandle AttendAsync(const AttendRequest& request, AttendCallback done,
                         const CallOptions& call = {});

  // Memory that a server on this host reads and writes in place. UNIMPLEMENTED over gRPC;
  // RESOURCE_EXHAUSTED over a limit of the server, or if this host has no memory.
  absl::StatusOr<std::unique_ptr<SharedMemory>> CreateSharedMemory(
      size_t bytes, const SharedMemoryOptions& options = {}, const CallOptions& call = {});

  // Memory on the GPU on which the server has `device_id` (SequenceInfo.device_id); empty: on its
  // first device. UNIMPLEMENTED over gRPC, if the server shares no memory of a GPU
  // (--local_device_tensors), or without a driver here; RESOURCE_EXHAUSTED over a limit of the
  // server; FAILED_PRECONDITION if this process does not see that GPU.
  absl::StatusOr<DeviceMemory> AllocateDeviceMemory(size_t bytes, const std::string& device_id = {},
                                                    const CallOptions& call = {});

  // An Attend in the order of `stream`, a CUstream or cudaStream_t: it begins when the work before
  // it in the stream is done, and work that is enqueued later finds O and LSE. No host waits for
  // the GPU, so a step submits all its layers ahead. All tensors are in DeviceMemory of this
  // Client, at multiples of 16 bytes; or in its SharedMemory. They are not copied, and must not
  // change but by the stream until `done` runs.
  //
  // `done` runs exactly once, as that of AttendAsync. If nothing was submitted, it runs before this
  // returns, and the stream does not wait. Else the stream goes on in any case, also if the request
  // fails, is cancelled or late, or the connection ends; the results are then unspecified, and
  // `done` has the error. UNAVAILABLE is never retried: later work of the stream is on its way.
  // Errors besides those of Attend:
  //   INVALID_ARGUMENT    a tensor is somewhere else
  //   NOT_FOUND           REGION_LOST: its DeviceMemory is of a connection that has ended
  //   RESOURCE_EXHAUSTED  requests of 64 other streams of this Client are unfinished, or the
  //                       message is over 1 MiB
  //   FAILED_PRECONDITION the stream is being captured into a CUDA graph; or it is the default
  //                       stream (0), and this thread has no current context
  //   UNIMPLEMENTED       over gRPC, or without a driver of CUDA 12.0 or later
  // Thread-safe. The first call connects, and the call blocks while the stream has no room for more
  // work, as a launch does: do not make it in a callback of this library.
  CallHandle AttendOnCudaStream(const AttendRequest& request, void* stream, AttendCallback done,
                                const CallOptions& call = {});

  // Opens an AttendStream. Its default deadline is none.
  std::unique_ptr<AttendStream> OpenStream(const StreamOptions& options = {});

  // The server's version, devices, kernels and limits. From then on, a message over
  // limits.max_message_bytes is RESOURCE_EXHAUSTED before it is sent.
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& call = {});

  // A new sequence with no rows. Sent once: if the reply is lost, the server may have created a
  // sequence without a handle. It is in ListSequences until it expires.
  absl::StatusOr<Sequence> CreateSequence(const SequenceOptions& options,
                                          const CallOptions& call = {});

  // A handle for the sequence of a known id (16 bytes). Its affinity is that of `call`. NOT_FOUND
  // if there is none that this client created or that is shared with it.
  absl::StatusOr<Sequence> OpenSequence(absl::string_view id, const CallOptions& call = {});

  // All sequences that this client created or forked, oldest first. Behind a proxy: those on the
  // one server that replies.
  absl::StatusOr<std::vector<v1::SequenceInfo>> ListSequences(const CallOptions& call = {});

  // Many operations in one call, for example the forks and deletes of a step of beam search; a
  // result for each, in order. One that fails does not stop the others, except that later ones on
  // the same sequence are ABORTED: put forks before deletes. INVALID_ARGUMENT for more than
  // limits.max_sequence_operations. With a Create or Fork the call is sent once: see
  // CreateSequence.
  //
  // It has one affinity, and so have the sequences that it makes: that of `call`, or if this is
  // empty, of the first operation that has one. Behind a proxy, all its sequences need the same.
  absl::StatusOr<std::vector<SequenceResult>> ManageSequences(
      absl::Span<const SequenceOperation> operations, const CallOptions& call = {});

  // grpc.health.v1 Check. An empty service asks for the whole server; NOT_FOUND if it is unknown.
  // Never retried: that the server cannot be reached is a result. A local target is serving if it
  // answers.
  absl::StatusOr<HealthStatus> CheckHealth(absl::string_view service = "",
                                           const CallOptions& call = {});

  // Connects if need be. False if there is no connection by the deadline.
  bool WaitForConnected(absl::Time deadline);

 private:
  explicit Client(std::shared_ptr<const client::Connection> connection);
  // `deadline`: of all attempts together.
  CallHandle StartCall(absl::StatusOr<std::unique_ptr<client::Attempts>> attempts,
                       bool safe_to_repeat, absl::Time deadline, AttendCallback done);

  const std::shared_ptr<const client::Connection> connection_;
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_H_
