// The same raw echo server written with each of gRPC's two asynchronous server APIs: the baseline
// for the transport of Attend.
#ifndef FLASHCORE_TESTS_BENCH_ECHO_SERVERS_H_
#define FLASHCORE_TESTS_BENCH_ECHO_SERVERS_H_

#include <cstddef>
#include <memory>
#include <string>

namespace flashcore::bench {

inline constexpr size_t kMaxRequestBytes = size_t{2} << 20;
inline constexpr size_t kMaxReplyBytes = size_t{1} << 20;
inline constexpr char kEchoMethod[] = "/flashcore.v1.AttentionService/Attend";

// A message of `bytes`, at least 8, to which an echo server answers with `reply_bytes`.
std::string EchoRequest(size_t bytes, size_t reply_bytes);

// Serves kEchoMethod until destroyed. Treats bytes as Attend does: copies a request once into a
// warm buffer and answers with a static slice. There is no queue and no kernel. A call with more
// than the sizes above does not succeed.
class EchoServer {
 public:
  virtual ~EchoServer() = default;
  int port = 0;  // of 127.0.0.1
};

struct EchoOptions {
  std::string unix_path;  // of a Unix socket to listen on, besides a TCP port; empty: none
  // Answer from one more thread, as a service does whose work is done by a device, instead of from
  // the thread that gRPC calls.
  bool handoff = false;
  // Only for the callback API: keep one of gRPC's threads polling, see SelfCheck.
  bool keep_polling = false;
};

// Null if they cannot listen.
std::unique_ptr<EchoServer> StartCallbackServer(const EchoOptions& options);
// `threads` completion queues, each with a thread of its own.
std::unique_ptr<EchoServer> StartQueueServer(const EchoOptions& options, int threads);

}  // namespace flashcore::bench

#endif  // FLASHCORE_TESTS_BENCH_ECHO_SERVERS_H_
