#include "tests/engine/sequence_burst.h"

#include <algorithm>
#include <utility>

#include "gtest/gtest.h"

namespace flashcore::server::testing {
namespace {

using absl::StatusCode;

bool Doomed(const std::vector<SequencePtr>& sequences) {
  return std::any_of(sequences.begin(), sequences.end(),
                     [](const SequencePtr& s) { return s != nullptr && s->doomed; });
}

}  // namespace

SequenceBurst::SequenceBurst(SequenceWorld* world, Dice* dice) : world_(world), dice_(dice) {
  const std::vector<SequencePtr> sequences = world_->PickSome(dice_->random(), 1 + dice_->Below(3));
  if (sequences.empty()) return;
  layer_ = dice_->Below(sequences[0]->shape.num_layers);
  for (const SequencePtr& sequence : sequences) {
    Member& member = members_.emplace_back();
    member.sequence = sequence;
    if (dice_->OneIn(3)) {
      member.to_read = std::shared_lock<std::shared_mutex>(sequence->locks[layer_]);
    } else {
      member.to_write = std::unique_lock<std::shared_mutex>(sequence->locks[layer_]);
    }
    member.length = sequence->layers[layer_].length();
  }
}

void SequenceBurst::Run() {
  if (members_.empty()) return;
  for (int requests = 1 + dice_->Below(8); requests > 0; --requests) {
    Submit();
    if (dice_->OneIn(3) && !flights_.empty()) SettleOldest();
    if (dice_->OneIn(6)) ForkWhileRequestsRun();
    if (dice_->OneIn(40)) world_->Delete(dice_->random());
  }
  while (!flights_.empty()) SettleOldest();
}

void SequenceBurst::Submit() {
  Flight flight = MakeFlight();
  AttendJob& job = *flight.job;
  const StatusCode refusal = dice_->OneIn(12) ? Spoil(&job.operation.request) : StatusCode::kOk;
  const auto is_gone = [](const SequencePtr& s) { return s != nullptr && s->gone; };
  const bool gone = std::any_of(flight.sequences.begin(), flight.sequences.end(), is_gone);
  const absl::Status status = Prepare(&job, &world_->engine());
  if (!status.ok() || refusal != StatusCode::kOk) {
    if (status.code() != refusal) {
      EXPECT_EQ(status.code(), StatusCode::kNotFound);
      EXPECT_TRUE(Doomed(flight.sequences)) << status;
    }
    return;
  }
  EXPECT_FALSE(gone) << "a sequence that was deleted is found";
  if ((flight.expired = dice_->OneIn(30))) job.operation.deadline = TimePoint();
  if (absl::Status queued = world_->engine().Enqueue(&job.operation); !queued.ok()) {
    ADD_FAILURE() << queued;
    return;
  }
  for (size_t i = 0; i < flight.sequences.size(); ++i) {
    if (flight.sequences[i] == nullptr) continue;
    FindMember(flight.sequences[i]).length += job.operation.request.spans[i].kv_rows;
  }
  flights_.push_back(std::move(flight));
  if (dice_->OneIn(12)) flights_[dice_->Below(flights_.size())].job->operation.cancelled = true;
}

SequenceBurst::Member& SequenceBurst::FindMember(const SequencePtr& sequence) {
  return *std::find_if(members_.begin(), members_.end(),
                       [&](const Member& m) { return m.sequence == sequence; });
}

SequenceBurst::Flight SequenceBurst::MakeFlight() {
  Flight flight;
  std::shuffle(members_.begin(), members_.end(), dice_->random);
  flight.job = std::make_unique<AttendJob>();
  AttendRequest& request = flight.job->operation.request;
  const SequenceShape& shape = members_[0].sequence->shape;
  request.num_kv_heads = shape.num_kv_heads;
  request.num_heads = shape.num_kv_heads * kGroup;
  request.head_dim = shape.head_dim;
  request.dtype = shape.dtype;
  request.layer = layer_;
  request.layout = dice_->OneIn(2) ? Layout::kNhd : Layout::kHnd;
  request.return_lse = dice_->OneIn(2);
  request.softmax_scale = dice_->OneIn(2) ? 0.125f : 1;
  const kernels::Mask masks[] = {kernels::Mask::None(), kernels::Mask::Causal(),
                                 kernels::Mask::SlidingWindow(70, 0)};
  request.mask = masks[dice_->Below(3)];
  request.append_only = members_[0].writes() && dice_->OneIn(8);
  flight.job->operation.client = dice_->OneIn(2) ? "alice" : "bob";

  std::vector<SpanShape> spans;
  const size_t resident = request.append_only ? 1 : 1 + dice_->Below(members_.size());
  for (size_t i = 0; i < resident; ++i) {
    spans.push_back(ResidentSpan(members_[i], request.append_only));
    flight.sequences.push_back(members_[i].sequence);
  }
  if (!request.append_only && dice_->OneIn(5)) {
    const size_t at = dice_->Below(spans.size() + 1);
    spans.insert(spans.begin() + at, SpanShape{1 + dice_->Below(3), dice_->Below(70), "", {}});
    flight.sequences.insert(flight.sequences.begin() + at, nullptr);
  }
  SetSpans(std::move(spans), &request);
  FillTensors(flight.job.get(), &dice_->random);
  return flight;
}

SpanShape SequenceBurst::ResidentSpan(const Member& member, bool append_only) {
  SpanShape span;
  span.query_rows = append_only ? 0 : 1 + dice_->Below(4);
  span.sequence_id = member.sequence->id.ToBytes();
  if (member.writes() && member.length < 300 && (append_only || dice_->OneIn(2))) {
    span.kv_rows = dice_->OneIn(3) ? 1 + dice_->Below(130) : 1 + dice_->Below(4);
  }
  if (dice_->OneIn(4)) span.expected_length = member.length + (dice_->OneIn(4) ? 1 : 0);
  return span;
}

StatusCode SequenceBurst::Spoil(AttendRequest* request) {
  SpanShape& span = request->spans[dice_->Below(request->spans.size())];
  switch (dice_->Below(4)) {
    case 0:
      span.sequence_id = SequenceId::Random(0).ToBytes();
      return StatusCode::kNotFound;
    case 1:
      request->layer = 7;
      return StatusCode::kInvalidArgument;
    case 2:
      request->query_bytes += 2;
      return StatusCode::kInvalidArgument;
    default:
      span.sequence_id += "x";
      return StatusCode::kInvalidArgument;
  }
}

// Full pages do not change while requests append, so their rows can be forked.
void SequenceBurst::ForkWhileRequestsRun() {
  const SequencePtr& parent = members_[dice_->Below(members_.size())].sequence;
  if (parent->shape.num_layers > 1) return;
  const uint64_t full_pages = parent->layers[0].length() / kernels::kPageTokens;
  const uint64_t length =
      dice_->Below(static_cast<uint32_t>(full_pages) + 1) * kernels::kPageTokens;
  world_->Fork(parent, length, dice_->OneIn(4), false);
}

void SequenceBurst::SettleOldest() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  const absl::Status status = world_->WaitFor(flight.job.get());
  EXPECT_TRUE(MayEnd(flight, status.code())) << status;
  if (status.ok()) return ApplyAndCompare(flight);
  for (size_t i = 0; i < flight.sequences.size(); ++i) {  // later requests will not find its rows
    if (flight.sequences[i] == nullptr) continue;
    FindMember(flight.sequences[i]).length -= flight.job->operation.request.spans[i].kv_rows;
  }
}

bool SequenceBurst::MayEnd(const Flight& flight, StatusCode code) const {
  bool mismatch = false, appends = false;
  for (size_t i = 0; i < flight.sequences.size(); ++i) {
    if (flight.sequences[i] == nullptr) continue;
    const SpanShape& span = flight.job->operation.request.spans[i];
    const uint64_t length = flight.sequences[i]->layers[layer_].length();
    mismatch |= span.expected_length.value_or(length) != length;
    appends |= span.kv_rows > 0;
  }
  switch (code) {
    case StatusCode::kOk:
      return !mismatch && !flight.expired;
    case StatusCode::kCancelled:
      return flight.job->operation.cancelled;
    case StatusCode::kDeadlineExceeded:
      return flight.expired;
    case StatusCode::kNotFound:
      return Doomed(flight.sequences);
    case StatusCode::kFailedPrecondition:
      return mismatch;
    case StatusCode::kResourceExhausted:
      return appends;
    case StatusCode::kInternal:
      return world_->device_fails();
    default:
      return false;
  }
}

void SequenceBurst::ApplyAndCompare(const Flight& flight) {
  const AttendJob& job = *flight.job;
  const AttendRequest& request = job.operation.request;
  std::vector<kernels::KvView> resident(request.spans.size());
  SpanCursor cursor(request, job.addresses());
  for (size_t i = 0; i < request.spans.size(); ++i, cursor.Advance()) {
    if (flight.sequences[i] == nullptr) continue;
    ModelLayer& layer = flight.sequences[i]->layers[layer_];
    if (request.spans[i].kv_rows > 0) layer.Append(cursor.tensors(), request.spans[i].kv_rows);
    resident[i] = layer.view();
    EXPECT_EQ(job.operation.sequence_lengths[i], layer.length());
  }
  if (request.append_only) return;
  EXPECT_EQ(FirstDifference(job, Reference(job, resident), world_->tolerance(request.dtype)), "");
}

}  // namespace flashcore::server::testing
