#include "tests/engine/sequence_burst.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/thread_alarm.h"

namespace flashcore::server::testing {
namespace {

using absl::StatusCode;

bool Doomed(const std::vector<SequencePtr>& sequences) {
  return std::any_of(sequences.begin(), sequences.end(),
                     [](const SequencePtr& s) { return s != nullptr && s->doomed; });
}

}  // namespace

SequenceBurst::SequenceBurst(SequenceWorld* world, Dice* dice) : world_(world), dice_(dice) {
  const std::vector<SequencePtr> sequences = world_->PickSome(dice_, 1 + dice_->Below(3));
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
  const StatusCode refusal = dice_->OneIn(12) ? Spoil(&job.operation) : StatusCode::kOk;
  const auto is_gone = [](const SequencePtr& s) { return s != nullptr && s->gone; };
  const bool gone = std::any_of(flight.sequences.begin(), flight.sequences.end(), is_gone);
  flight.submitted = world_->clock().Now();
  const absl::Status status = Admit(&flight);
  if (!status.ok() || refusal != StatusCode::kOk) return ExpectRefusal(flight, status, refusal);
  WriteInputs(&job);
  EXPECT_FALSE(gone) << "a sequence that was deleted or lost is found";
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

absl::Status SequenceBurst::Admit(Flight* flight) {
  AttendOperation* const operation = &flight->job->operation;
  if (!world_->has_limits()) return AdmitNow(&world_->engine(), operation);
  if ((flight->may_expire = dice_->OneIn(5))) {
    operation->deadline = flight->submitted + std::chrono::milliseconds(dice_->Below(4));
  }
  std::promise<absl::Status> promise;
  std::future<absl::Status> answer = promise.get_future();
  world_->engine().Admit(operation, &ThreadAlarm::Make,
                         [promise = std::move(promise)](absl::Status status) mutable {
                           promise.set_value(std::move(status));
                         });
  const auto ready = [&](std::chrono::seconds limit) {
    return answer.wait_for(limit) == std::future_status::ready;
  };
  if (ready(std::chrono::seconds(0))) return answer.get();
  if (dice_->OneIn(6)) operation->Cancel();
  // Requests of this burst may have the memory that it waits for.
  while (!flights_.empty() && !ready(std::chrono::seconds(0))) SettleOldest();
  if (!ready(std::chrono::minutes(2))) {
    std::cerr << "a request waits for staging memory without end" << std::endl;
    std::abort();  // the engine has its address
  }
  absl::Status status = answer.get();
  world_->Note(absl::StrCat("waited for staging: ", absl::StatusCodeToString(status.code())));
  return status;
}

void SequenceBurst::ExpectRefusal(const Flight& flight, const absl::Status& status,
                                  StatusCode wrong) {
  const AttendOperation& operation = flight.job->operation;
  if (wrong != StatusCode::kOk && status.code() == wrong) return;
  switch (status.code()) {
    case StatusCode::kNotFound:
      return ExpectOneIsGone(flight);
    case StatusCode::kCancelled:
      EXPECT_TRUE(operation.cancelled);
      return;
    case StatusCode::kDeadlineExceeded:
      EXPECT_TRUE(flight.may_expire) << status;
      return;
    case StatusCode::kResourceExhausted:
      EXPECT_TRUE(world_->has_limits()) << status;
      return;
    default:
      ADD_FAILURE() << status;
  }
}

// The store has not found a sequence of the request: one is deleted, or lost.
void SequenceBurst::ExpectOneIsGone(const Flight& flight) {
  if (Doomed(flight.sequences)) return;
  bool one_is_gone = false;
  for (const SequencePtr& sequence : flight.sequences) {
    if (sequence == nullptr) continue;
    if (world_->engine().sequences().Get(sequence->id, IdentityOf("alice")).ok()) continue;
    world_->ExpectLost(sequence);
    one_is_gone = true;
  }
  EXPECT_TRUE(one_is_gone);
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
  request.terms.softmax_scale = dice_->OneIn(2) ? 0.125f : 1;
  const kernels::Mask masks[] = {kernels::Mask::None(), kernels::Mask::Causal(),
                                 kernels::Mask::SlidingWindow(70, 0),
                                 kernels::Mask::SlidingWindow(600 + dice_->Below(128), 0)};
  request.terms.mask = masks[dice_->Below(std::size(masks))];
  // Only the owner appends; the others of the group read.
  const std::string client = members_[dice_->Below(members_.size())].sequence->client;
  flight.job->operation.identity = IdentityOf(client);
  request.append_only = Appends(members_[0], client) && dice_->OneIn(8);

  std::vector<SpanShape> spans;
  const size_t resident = request.append_only ? 1 : 1 + dice_->Below(members_.size());
  for (size_t i = 0; i < resident; ++i) {
    spans.push_back(ResidentSpan(members_[i], client, request.append_only));
    flight.sequences.push_back(members_[i].sequence);
  }
  // Inline K/V comes only beside K/V of its type.
  const bool with_inline = !kernels::Is8Bit(shape.kv_dtype);
  if (!request.append_only && with_inline && dice_->OneIn(5)) {
    const size_t at = dice_->Below(spans.size() + 1);
    spans.insert(spans.begin() + at, SpanShape{1 + dice_->Below(3), dice_->Below(70), "", {}});
    flight.sequences.insert(flight.sequences.begin() + at, nullptr);
  }
  SetSpans(std::move(spans), &request);
  FillTensors(flight.job.get(), &dice_->random);
  return flight;
}

bool SequenceBurst::Appends(const Member& member, const std::string& client) {
  return member.writes() && member.sequence->client == client;
}

SpanShape SequenceBurst::ResidentSpan(const Member& member, const std::string& client,
                                      bool append_only) {
  SpanShape span;
  span.query_rows = append_only ? 0 : 1 + dice_->Below(4);
  if (!append_only && world_->cuts() && dice_->OneIn(60)) span.query_rows = 65 + dice_->Below(150);
  span.sequence_id = member.sequence->id.ToBytes();
  if (Appends(member, client) && member.length < world_->length() &&
      (append_only || dice_->OneIn(2))) {
    span.kv_rows = dice_->OneIn(3) ? 1 + dice_->Below(130) : 1 + dice_->Below(4);
    const uint64_t prompt = world_->length() / 2;
    if (member.length < prompt && dice_->OneIn(4)) span.kv_rows = dice_->Below(prompt) + 1;
  }
  if (dice_->OneIn(4)) span.expected_length = member.length + (dice_->OneIn(4) ? 1 : 0);
  return span;
}

StatusCode SequenceBurst::Spoil(AttendOperation* operation) {
  AttendRequest* const request = &operation->request;
  SpanShape& span = request->spans[dice_->Below(request->spans.size())];
  switch (dice_->Below(5)) {
    case 4:
      operation->identity = {"mallory", {}};  // whom nothing is shared with
      return StatusCode::kNotFound;
    case 0:
      span.sequence_id = SequenceId::Random().ToBytes();
      return StatusCode::kNotFound;
    case 1:
      request->layer = 7;
      return StatusCode::kInvalidArgument;
    case 2:
      request->query_bytes += 2;
      return StatusCode::kInvalidArgument;
    default:
      span.sequence_id = "seventeen bytes x";
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
  world_->Fork(parent, length, dice_, false);
}

void SequenceBurst::SettleOldest() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  const absl::Status status = world_->WaitFor(flight.job.get());
  for (const SequencePtr& sequence : flight.sequences) {
    if (sequence != nullptr) sequence->MarkUsed(flight.submitted);
  }
  if (absl::StrContains(status.message(), "client quota: the sequences")) {
    world_->Note("refused by the quota of K/V");
  }
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
      return flight.expired || flight.may_expire;
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
