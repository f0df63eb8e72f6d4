// Requests whose K/V comes inline: the same random one again and again.
#ifndef FLASHCORE_CLIENT_CLI_INLINE_WORKLOAD_H_
#define FLASHCORE_CLIENT_CLI_INLINE_WORKLOAD_H_

#include <cstdint>
#include <memory>

#include "client/cli/random_request.h"
#include "client/cli/reply_check.h"
#include "client/cli/workload.h"

namespace flashcore::cli {

// Checks every answer against the first, and the first against the float64 reference on some rows.
class InlineWorkload final : public Workload {
 public:
  // Shapes, dtype, layout and mask come from `shape`.
  InlineWorkload(const AttendRequest& shape, uint64_t seed) : shape_(shape), seed_(seed) {}

  absl::Status Setup() override;
  absl::Status Prepare() override;
  AttendRequest& request() override { return problem_->request(); }
  double RequestFlop() const override;
  bool Accept(const AttendResult& result) override;
  void OnError(const absl::Status&) override {}
  absl::Status Teardown() override { return absl::OkStatus(); }

 private:
  const AttendRequest shape_;
  const uint64_t seed_;
  std::unique_ptr<RandomRequest> problem_;  // after Setup
  ReplyCheck check_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_INLINE_WORKLOAD_H_
