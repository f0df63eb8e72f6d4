// The same raw echo server written with each of gRPC's two asynchronous server APIs.
#ifndef FLASHCORE_TESTS_BENCH_ECHO_SERVERS_H_
#define FLASHCORE_TESTS_BENCH_ECHO_SERVERS_H_

#include <memory>
#include <string>
#include <vector>

namespace flashcore::bench {

inline constexpr size_t kSmallRequestBytes = 1024;
inline constexpr size_t kSmallReplyBytes = 1024;
inline constexpr size_t kLargeRequestBytes = size_t{3} << 19;  // Q, K and V of 1x8x512x64 in FP16
inline constexpr size_t kLargeReplyBytes = size_t{1} << 19;    // O of the same

// Copies a request once into a warm buffer and answers with a static slice: of kLargeReplyBytes to
// a request of kLargeRequestBytes or more, of kSmallReplyBytes to any other. Serves until
// destroyed.
class EchoServer {
 public:
  virtual ~EchoServer() = default;
  int port = 0;  // of 127.0.0.1
};

struct EchoOptions {
  std::string unix_path;  // of a Unix socket to listen on, besides a TCP port
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
