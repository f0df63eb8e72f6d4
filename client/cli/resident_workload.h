// Requests over resident sequences: decode steps, or chunks of a prefill.
#ifndef FLASHCORE_CLIENT_CLI_RESIDENT_WORKLOAD_H_
#define FLASHCORE_CLIENT_CLI_RESIDENT_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/reply_check.h"
#include "client/cli/resident_context.h"
#include "client/cli/workload.h"

namespace flashcore::cli {

// How a workload goes through its contexts: a step appends `rows` rows to each context of a group
// and attends from them; a group that has reached `end` is truncated back to `start`, and the next
// group is stepped.
struct StepPlan {
  uint64_t start = 0;  // rows
  uint64_t end = 0;    // rows, more than `start`
  uint32_t rows = 1;   // at most; the last step stops at `end`
  uint32_t group = 1;  // contexts of one request; divides their number
};

// Checks the sequence_lengths of every answer; that it is, at some places, as it was when the same
// step was answered before; and the first answer against the float64 reference on some rows and
// heads, for which K/V is made again. After an error whose outcome is not known, or the loss of a
// sequence, Prepare puts every context back to `start`.
class ResidentWorkload final : public Workload {
 public:
  // `shape` has heads, head_dim, dtype and layout, and no spans.
  ResidentWorkload(const AttendRequest& shape, const StepPlan& plan,
                   std::vector<ResidentContext> contexts);

  absl::Status Setup() override;
  absl::Status Prepare() override;
  AttendRequest& request() override { return request_; }
  double RequestFlop() const override { return flop_; }
  bool Accept(const AttendResult& result) override;
  void OnError(const absl::Status& status) override;
  absl::Status Teardown() override;

 private:
  absl::Span<ResidentContext> Group();  // of the next step
  absl::Status NextGroup();
  void FillRequest();
  bool FirstReplyIsRight();
  // Some rows of one span and one KV head against the reference.
  bool SpotCheckSpan(size_t index, uint32_t kv_head);

  const StepPlan plan_;
  std::vector<ResidentContext> contexts_;
  std::string device_id_;      // of all contexts, which share requests; empty before there is one
  size_t first_in_group_ = 0;  // index of its first context
  uint64_t length_ = 0;        // of each context of the group, before request()
  uint32_t rows_ = 0;          // that request() appends to each
  bool restore_ = false;       // the contexts may not be as we believe
  AttendRequest request_;
  double flop_ = 0;  // of request_
  std::vector<uint16_t> query_, key_, value_, output_;
  ReplyCheck check_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_RESIDENT_WORKLOAD_H_
