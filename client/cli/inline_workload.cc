#include "client/cli/inline_workload.h"

#include <random>

#include "client/cli/oracle.h"

namespace flashcore::cli {

absl::Status InlineWorkload::Setup() {
  std::mt19937_64 random(seed_);
  problem_ = std::make_unique<RandomRequest>(shape_, /*want_lse=*/false, /*magnitude=*/1, &random);
  return absl::OkStatus();
}

absl::Status InlineWorkload::Prepare() {
  ReplyCheck::Poison(absl::MakeSpan(problem_->output()));
  return absl::OkStatus();
}

double InlineWorkload::RequestFlop() const {
  double flop = 0;
  for (const SpanShape& span : shape_.spans) {
    flop += AttentionFlop(shape_, span.query_rows, span.kv_rows);
  }
  return flop;
}

bool InlineWorkload::Accept(const AttendResult&) {
  if (check_.empty() && !SpotCheck(ToKernelBatch(problem_->request()))) return false;
  return check_.Matches(0, problem_->output());
}

}  // namespace flashcore::cli
