// Resident sequences for the client's tests: what a FakeServer needs to answer as a real one would.
#ifndef FLASHCORE_TESTS_CLIENT_FAKE_SEQUENCES_H_
#define FLASHCORE_TESTS_CLIENT_FAKE_SEQUENCES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/attention.h"
#include "tests/client/fake_server.h"

namespace flashcore {

// Keeps the K/V of sequences and attends in float64, inline spans included. It obeys the
// contract for well-formed requests, of which it checks ids, lengths and devices alone. Sequences
// that may be anywhere are created on fake:0 and fake:1 in turn. Thread-safe.
class FakeSequences {
 public:
  // The attention of one span, before it is computed. K and V are [rows, num_kv_heads, head_dim].
  struct Attention {
    kernels::Geometry geometry;
    kernels::Span span;  // its K/V is `key` and `value`
    std::string key, value;
    bool resident = false;
  };
  // Makes the answer wrong. Set it before the first call.
  std::function<void(Attention*)> fault;

  // Sets the handlers of `server`, which must not outlive this.
  void Install(FakeServer* server);

  size_t size() const ABSL_LOCKS_EXCLUDED(mutex_);  // sequences that exist
  int streamed() const { return streamed_; }        // Attends that came on streams so far
  // Forgets every sequence, as a server that evicts does.
  void Clear() ABSL_LOCKS_EXCLUDED(mutex_);
  // K, and V, of layer 0 in [rows, num_kv_heads, head_dim]; the sequence must exist.
  std::string key(const std::string& id) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::string value(const std::string& id) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Layer {
    std::string key, value;  // [rows, num_kv_heads, head_dim]
  };
  struct Sequence {
    v1::SequenceInfo info;  // layer_lengths and kv_bytes are set when it is asked for
    std::vector<Layer> layers;
  };

  grpc::Status Create(const v1::CreateSequenceRequest& request,
                      v1::CreateSequenceResponse* response) ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status Fork(const v1::ForkSequenceRequest& request, v1::ForkSequenceResponse* response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status Load(FakeServer::LoadReader* reader, v1::LoadSequenceResponse* response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status Truncate(const v1::TruncateSequenceRequest& request,
                        v1::TruncateSequenceResponse* response) ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::Status AttendStream(FakeServer::Stream* stream) ABSL_LOCKS_EXCLUDED(mutex_);

  Sequence* Find(const std::string& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Insert(Sequence sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // its id
  static uint64_t Length(const Sequence& sequence, uint32_t layer);
  static void Cut(uint64_t length, Sequence* sequence);
  static v1::SequenceInfo InfoOf(const Sequence& sequence);

  std::atomic<int> streamed_{0};
  mutable absl::Mutex mutex_;
  uint64_t created_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Sequence> sequences_ ABSL_GUARDED_BY(mutex_);  // by id
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_FAKE_SEQUENCES_H_
