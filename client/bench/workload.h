// The requests of one worker of a load: one after the other, with checks of the replies.
#ifndef FLASHCORE_CLIENT_BENCH_WORKLOAD_H_
#define FLASHCORE_CLIENT_BENCH_WORKLOAD_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/bench/load.h"
#include "flashcore/client.h"

namespace flashcore::cli {

enum class Tensor : uint8_t { kQuery, kKey, kValue };

// The content of one sequence: a hash of seed, tensor, row, head and index. Checks compute rows
// again when they need them, so that a long context is never kept in memory. The first
// `prefix_rows` rows are those of seed 0.
struct RowSource {
  DType dtype = DType::kFloat16;
  uint32_t head_dim = 0;
  uint64_t seed = 0;
  uint64_t prefix_rows = 0;

  // Writes rows [first_row, first_row + rows) of heads [first_head, first_head + heads) to `out`,
  // rows * heads * head_dim elements. They are random in sign and, from 1/2 to 1, in magnitude.
  void Fill(Tensor tensor, uint64_t first_row, uint64_t rows, uint32_t first_head, uint32_t heads,
            Layout layout, absl::Span<uint16_t> out) const;
};

// A sequence of one layer with the first `fork_from_prefix` rows of seed 0. Forks of it load it
// again if the server has lost it. `client` outlives it.
absl::StatusOr<Sequence> CreatePrefix(const LoadOptions& options, Client* client);

// Requests of one kind. Used by one thread at a time. The order of calls is Setup; then for each
// request Prepare and, after it was sent, Accept or OnError; at the end, whatever came before,
// Teardown. Latencies cover only the time between Prepare and the reply.
//
// Inline: always the same request. Resident: a step appends rows to each sequence of a group and
// attends from as many; a group that has `end_` rows is truncated to `start_` rows, and the next
// group follows. After an error with an unknown outcome, or the loss of a sequence, Prepare makes
// all sequences again. load.h says how replies are checked.
class Workload {
 public:
  // `client` and `prefix` outlive this.
  static std::unique_ptr<Workload> Inline(const LoadOptions& options, int index, Client* client);
  // On the sequences of worker `index`: forks of `prefix`, unless that is null.
  static std::unique_ptr<Workload> Resident(const LoadOptions& options, int index, Client* client,
                                            const Sequence* prefix);

  absl::Status Setup();    // makes what the requests need, here and on the server
  absl::Status Prepare();  // makes request() the next one to send; can be repeated after an error
  bool Accept(const AttendResult& result);  // whether the reply is correct; once for each reply
  void OnError(const absl::Status& status);
  absl::Status Teardown();  // deletes what Setup made on the server

  AttendRequest& request() { return request_; }
  double RequestFlop() const;  // floating-point operations of request()

 private:
  static constexpr size_t kProbes = 16;
  struct Context {
    RowSource rows;
    std::optional<Sequence> sequence = {};
  };

  Workload(const LoadOptions& options, Client* client);

  absl::Span<Context> Group();
  absl::Status Load(Context* context);
  absl::Status NextGroup();
  absl::Status FillInline();
  absl::Status FillStep();
  bool SpotCheckStep();
  // Points request_ at memory for its spans. Keeps the content if the spans have not changed.
  absl::Status AllocateTensors();
  absl::Span<uint16_t> Input(Tensor tensor);  // of request_, to be written
  uint32_t Heads(Tensor tensor) const;
  uint16_t& Probe(size_t i) const;  // an element of the output

  Client* const client_;
  AttendRequest request_;
  const bool share_memory_;
  std::unique_ptr<SharedMemory> shared_;
  std::vector<std::byte> host_;
  std::byte* tensors_ = nullptr;  // in one of them: request_'s, the query first
  absl::flat_hash_map<uint64_t, std::array<uint16_t, kProbes>> first_replies_;  // by step
  uint64_t seed_ = 0;                                                           // if inline

  std::vector<Context> contexts_;  // empty if inline
  const Sequence* prefix_ = nullptr;
  SequenceOptions sequence_options_;  // the device is that of the first sequence
  uint64_t start_ = 0;
  uint64_t end_ = 0;
  uint32_t step_rows_ = 1;     // the last step of a group has fewer, to stop at `end_`
  size_t group_ = 1;           // sequences in one request; divides their number
  size_t first_in_group_ = 0;  // in contexts_
  uint64_t length_ = 0;        // of each sequence of the group, before request()
  uint32_t rows_ = 0;          // that request() appends to each
  bool restore_ = false;       // the server may not have the rows that contexts_ expects
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_WORKLOAD_H_
