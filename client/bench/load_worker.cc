#include "client/bench/load_worker.h"

#include <sys/prctl.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace flashcore::cli {
namespace {

constexpr std::chrono::milliseconds kPauseAfterError(10);  // a dead server fails fast

}  // namespace

Worker::Worker(int index, Shared* shared, Client* client, Client* compared)
    : index_(index), shared_(shared), client_(client), compared_(compared) {
  const LoadOptions& options = shared->options;
  if (options.mode == BenchMode::kAttend) {
    AddTurn("attend", Workload::Inline(options, index, client));
  } else {
    AddTurn(Prefills(options.mode, index, options.concurrency) ? "prefill" : "decode",
            Workload::Resident(options, index, client,
                               shared->prefix.has_value() ? &*shared->prefix : nullptr));
  }
  if (options.resident.compare_inline) {
    AddTurn("inline", Workload::Inline(options, index, client));
  }
  if (options.compare_unary) turns_.push_back({"unary", turns_[0].workload, /*unary=*/true});
  if (compared != nullptr) {
    LoadOptions plain = options;
    plain.shared_memory = false;
    AddTurn("grpc", options.mode == BenchMode::kAttend
                        ? Workload::Inline(plain, index, compared)
                        : Workload::Resident(plain, index, compared, /*prefix=*/nullptr));
    turns_.back().compared = true;
  }
}

absl::Status Worker::Each(absl::Status (Workload::*step)()) {
  absl::Status status;
  for (const auto& workload : workloads_) status.Update(((*workload).*step)());
  return status;
}

void Worker::Run(const Streams& streams) {
  // The default slack of 50 us would show as latency in an open loop.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  turn_ = &turns_[0];
  turn_start_ = shared_->start;
  for (Turn& turn : turns_) turn.time = {};
  while (!shared_->interrupted) {
    const SteadyTime now = shared_->Now();
    if (now >= shared_->end) return;
    const uint64_t number = turns_.size() == 1 ? 0 : shared_->TurnAt(now);
    Turn& turn = turns_[number % turns_.size()];
    if (&turn != turn_) EndTurn(now);
    turn_ = &turn;
    if (!Prepare(turn)) continue;
    const std::optional<SteadyTime> due = NextDue();
    if (!due.has_value()) return;
    Send(turn, streams, *due);
  }
}

void Worker::AddTurnTimes(SteadyTime window_end, TurnTimes* times) {
  EndTurn(window_end);
  for (const Turn& turn : turns_) {
    auto& [time, workers] = (*times)[turn.kind];
    time += turn.time;
    ++workers;
  }
}

void Worker::EndTurn(SteadyTime now) {
  const SteadyTime begin = std::max(turn_start_, shared_->window_start);
  turn_->time += std::max(std::min(now, shared_->end) - begin, SteadyTime::duration::zero());
  turn_start_ = now;
}

void Worker::AddTurn(const char* kind, std::unique_ptr<Workload> workload) {
  turns_.push_back({kind, workload.get()});
  workloads_.push_back(std::move(workload));
}

bool Worker::Prepare(const Turn& turn) {
  const absl::Status status = turn.workload->Prepare();
  if (!status.ok()) RecordError(status, shared_->Now());
  return status.ok();
}

std::optional<SteadyTime> Worker::NextDue() {
  const double rate = shared_->options.rate;
  if (rate == 0) return shared_->Now();
  const uint64_t number = shared_->next_request.fetch_add(1);
  if (number >= shared_->due_requests) return std::nullopt;
  const std::chrono::duration<double> wait(static_cast<double>(number) / rate);
  const SteadyTime due =
      shared_->start + std::chrono::duration_cast<std::chrono::nanoseconds>(wait);
  shared_->options.clock.sleep_until(due);
  return due;
}

void Worker::Send(const Turn& turn, const Streams& streams, SteadyTime due) {
  Client* const client = turn.compared ? compared_ : client_;
  AttendStream* stream = (turn.compared ? streams.compared : streams.attend).get();
  if (turn.unary) stream = nullptr;
  AttendResult& result = result_;
  AttendRequest& request = turn.workload->request();
  const absl::Status status = stream == nullptr ? client->Attend(request, &result)
                                                : SendOnStream(stream, &request, &result);
  const SteadyTime end = shared_->Now();
  if (!status.ok()) {
    turn.workload->OnError(status);
    RecordError(status, due);
    return;
  }
  const bool correct = turn.workload->Accept(result);
  absl::MutexLock lock(&shared_->mutex);
  if (!correct) {
    ++shared_->result.wrong_replies;
    return;
  }
  Series& series = shared_->result.series[turn.kind];
  if (!Record(&series, result.timing, due, end)) return;
  series.flop += turn.workload->RequestFlop();
  for (const SpanShape& span : request.spans) series.query_rows += span.query_rows;
  series.request_bytes += result.request_bytes;
  series.response_bytes += result.response_bytes;
}

absl::Status Worker::SendOnStream(AttendStream* stream, AttendRequest* request,
                                  AttendResult* result) {
  request->request_id = absl::StrCat(index_, "-", sent_on_stream_++);
  absl::Notification done;
  absl::Status answer;
  const absl::Status sent =
      stream->Send(*request, [&](absl::Status status, AttendResult from_stream) {
        answer = std::move(status);
        *result = std::move(from_stream);
        done.Notify();
      });
  if (!sent.ok()) return sent;
  done.WaitForNotification();
  return answer;
}

bool Worker::Record(Series* series, const Timing& timing, SteadyTime due, SteadyTime end) {
  if (end >= shared_->window_start && end <= shared_->end) ++series->ended;
  if (due < shared_->window_start) return false;
  const std::array<uint64_t, kPhases.size()> phases = {timing.receive_ns, timing.staging_wait_ns,
                                                       timing.queue_ns,   timing.copy_in_ns,
                                                       timing.kernel_ns,  timing.copy_out_ns};
  Sample& sample = series->samples.emplace_back();
  sample.latency_us = std::chrono::duration<float, std::micro>(end - due).count();
  for (size_t i = 0; i < phases.size(); ++i) {
    sample.phase_us[i] = static_cast<float>(phases[i]) * 1e-3f;
  }
  return true;
}

void Worker::RecordError(const absl::Status& status, SteadyTime due) {
  if (due >= shared_->window_start) {
    absl::MutexLock lock(&shared_->mutex);
    LoadResult& result = shared_->result;
    ++result.errors[absl::StatusCodeToString(status.code())];
    if (result.first_error.empty())
      result.first_error = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
  }
  shared_->options.clock.sleep_until(shared_->Now() + kPauseAfterError);
}

}  // namespace flashcore::cli
