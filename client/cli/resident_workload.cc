#include "client/cli/resident_workload.h"

#include <algorithm>
#include <utility>

#include "client/cli/oracle.h"

namespace flashcore::cli {
namespace {

constexpr size_t kSpotCheckSpans = 4;  // of the first answer; one KV head of each

absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements) {
  return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * sizeof(uint16_t)};
}

}  // namespace

ResidentWorkload::ResidentWorkload(const AttendRequest& shape, const StepPlan& plan,
                                   std::vector<ResidentContext> contexts)
    : plan_(plan), contexts_(std::move(contexts)), request_(shape) {
  request_.mask = Mask::Causal();
}

absl::Status ResidentWorkload::Setup() {
  for (ResidentContext& context : contexts_) {
    if (absl::Status status = context.Restore(plan_.start, device_id_); !status.ok()) return status;
    device_id_ = context.device_id();
  }
  first_in_group_ = 0;
  length_ = plan_.start;
  restore_ = false;
  return absl::OkStatus();
}

absl::Status ResidentWorkload::Prepare() {
  absl::Status status;
  if (restore_) {
    status = Setup();
  } else if (length_ == plan_.end) {
    status = NextGroup();
  }
  if (status.ok()) FillRequest();
  return status;
}

absl::Span<ResidentContext> ResidentWorkload::Group() {
  return absl::MakeSpan(contexts_).subspan(first_in_group_, plan_.group);
}

absl::Status ResidentWorkload::NextGroup() {
  for (ResidentContext& context : Group()) {
    absl::Status status = context.Truncate(plan_.start, plan_.end);
    restore_ = !status.ok();
    if (!status.ok()) return status;
  }
  first_in_group_ = (first_in_group_ + plan_.group) % contexts_.size();
  length_ = plan_.start;
  return absl::OkStatus();
}

void ResidentWorkload::FillRequest() {
  rows_ = static_cast<uint32_t>(std::min<uint64_t>(plan_.rows, plan_.end - length_));
  const size_t query_elements = size_t{rows_} * request_.num_heads * request_.head_dim;
  const size_t kv_elements = size_t{rows_} * request_.num_kv_heads * request_.head_dim;
  query_.resize(plan_.group * query_elements);
  output_.resize(query_.size());
  key_.resize(plan_.group * kv_elements);
  value_.resize(key_.size());
  request_.spans.clear();
  for (const ResidentContext& context : Group()) {
    const size_t span = request_.spans.size();
    const auto fill = [&](Tensor tensor, uint32_t heads, size_t elements,
                          std::vector<uint16_t>* out) {
      context.source().Fill(tensor, length_, rows_, heads, request_.layout,
                            absl::MakeSpan(*out).subspan(span * elements, elements));
    };
    fill(Tensor::kQuery, request_.num_heads, query_elements, &query_);
    fill(Tensor::kKey, request_.num_kv_heads, kv_elements, &key_);
    fill(Tensor::kValue, request_.num_kv_heads, kv_elements, &value_);
    request_.spans.push_back({rows_, rows_, context.id(), length_});
  }
  request_.query = Bytes(query_);
  request_.key = Bytes(key_);
  request_.value = Bytes(value_);
  request_.output = {reinterpret_cast<std::byte*>(output_.data()), output_.size() * 2};
  flop_ = plan_.group * AttentionFlop(request_, rows_, length_ + rows_);
  ReplyCheck::Poison(absl::MakeSpan(output_));
}

bool ResidentWorkload::Accept(const AttendResult& result) {
  const bool right =
      result.sequence_lengths == std::vector<uint64_t>(request_.spans.size(), length_ + rows_) &&
      (!check_.empty() || FirstReplyIsRight()) &&
      check_.Matches(first_in_group_ * plan_.end + length_, output_);
  length_ += rows_;
  if (!right) restore_ = true;
  return right;
}

void ResidentWorkload::OnError(const absl::Status& status) {
  // A full queue changes nothing: the same request can be sent again.
  if (!absl::IsResourceExhausted(status)) restore_ = true;
}

absl::Status ResidentWorkload::Teardown() {
  absl::Status first;
  for (ResidentContext& context : contexts_) {
    const absl::Status status = context.Delete();
    first.Update(status);
    // Nobody waits for the timeout of every one of them.
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) break;
  }
  return first;
}

bool ResidentWorkload::FirstReplyIsRight() {
  for (size_t i = 0; i < std::min<size_t>(kSpotCheckSpans, plan_.group); ++i) {
    if (!SpotCheckSpan(i, static_cast<uint32_t>(i) % request_.num_kv_heads)) return false;
  }
  return true;
}

bool ResidentWorkload::SpotCheckSpan(size_t index, uint32_t kv_head) {
  const uint64_t kv_rows = length_ + rows_;
  const RowSource& source = Group()[index].source();
  std::vector<uint16_t> key(kv_rows * request_.head_dim), value(key.size());
  source.FillHead(Tensor::kKey, 0, kv_rows, kv_head, absl::MakeSpan(key));
  source.FillHead(Tensor::kValue, 0, kv_rows, kv_head, absl::MakeSpan(value));
  return SpotCheck(
      OneKvHead(ToKernelBatch(request_), index, static_cast<int32_t>(kv_head), key, value));
}

}  // namespace flashcore::cli
