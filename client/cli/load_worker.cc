#include "client/cli/load_worker.h"

#include <sys/prctl.h>

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace flashcore::cli {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(50);            // of one turn
constexpr absl::Duration kPauseAfterError = absl::Milliseconds(10);  // a dead server fails fast

float Microseconds(absl::Duration duration) {
  return static_cast<float>(absl::ToDoubleMicroseconds(duration));
}

}  // namespace

LoadWorker::LoadWorker(int index, LoadShared* shared, Client* client, std::vector<WorkerLoad> loads)
    : index_(index), shared_(shared), client_(client), loads_(std::move(loads)) {
  for (const WorkerLoad& load : loads_) result_.series[load.kind];  // there, if nothing succeeds
}

absl::Status LoadWorker::Setup() {
  for (const WorkerLoad& load : loads_) {
    if (absl::Status status = load.workload->Setup(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LoadWorker::Teardown() {
  absl::Status status;
  for (const WorkerLoad& load : loads_) status.Update(load.workload->Teardown());
  return status;
}

void LoadWorker::Run(AttendStream* stream) {
  stream_ = stream;
  // The default slack of 50 us would show as latency in an open loop.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  if (shared_->options->rate > 0) {
    RunOpenLoop();
  } else {
    RunClosedLoop();
  }
  const double wall_seconds = absl::ToDoubleSeconds(absl::Now() - shared_->measure_start);
  for (auto& [kind, series] : result_.series) {
    double seconds = wall_seconds;
    if (Turns() > 1) {  // only the time spent on its own requests counts for a kind
      seconds = 1e-6 * std::accumulate(series.latency_us.begin(), series.latency_us.end(), 0.0);
    }
    if (seconds > 0) series.per_second = static_cast<double>(series.latency_us.size()) / seconds;
  }
}

size_t LoadWorker::Turns() const {
  return loads_.size() + (shared_->options->compare_unary ? 1 : 0) +
         (shared_->options->echo ? 1 : 0);
}

void LoadWorker::RunOpenLoop() {
  absl::Time due;
  while (true) {
    // When it is over, NextDue still counts what was not sent.
    if (!shared_->Over(absl::Now()) && !Prepare(loads_[0])) continue;
    if (!NextDue(&due)) return;
    Send(loads_[0], loads_[0].kind, stream_, due);
  }
}

void LoadWorker::RunClosedLoop() {
  for (absl::Time now = absl::Now(); !shared_->Over(now); now = absl::Now()) {
    const size_t turn = static_cast<size_t>((now - shared_->start) / kSlice) % Turns();
    if (turn < loads_.size()) {
      if (Prepare(loads_[turn])) Send(loads_[turn], loads_[turn].kind, stream_, absl::Now());
    } else if (turn == loads_.size() && shared_->options->compare_unary) {
      if (Prepare(loads_[0])) Send(loads_[0], "unary", /*stream=*/nullptr, absl::Now());
    } else {
      EchoOnce();
    }
  }
}

bool LoadWorker::NextDue(absl::Time* due) {
  while (true) {
    const uint64_t number = shared_->next_due.fetch_add(1);
    *due = shared_->start + absl::Seconds(static_cast<double>(number) / shared_->options->rate);
    if (*due >= shared_->end) return false;
    const absl::Time now = absl::Now();
    if (!shared_->Over(now)) {
      absl::SleepFor(*due - now);
      return true;
    }
    if (shared_->interrupted->load()) return false;
    if (*due >= shared_->measure_start) ++result_.not_sent;
  }
}

bool LoadWorker::Prepare(const WorkerLoad& load) {
  const absl::Status status = load.workload->Prepare();
  if (!status.ok()) RecordError(status, absl::Now());
  return status.ok();
}

void LoadWorker::Send(const WorkerLoad& load, const std::string& kind, AttendStream* stream,
                      absl::Time due) {
  AttendResult result;
  AttendRequest& request = load.workload->request();
  const absl::Status status =
      stream == nullptr ? client_->Attend(request, &result) : CallStream(stream, &request, &result);
  const absl::Duration latency = absl::Now() - due;
  if (!status.ok()) {
    load.workload->OnError(status);
    RecordError(status, due);
    return;
  }
  const bool measured = due >= shared_->measure_start;
  if (!load.workload->Accept(result)) {
    ++result_.wrong_replies;
    shared_->failed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  shared_->finished.fetch_add(1, std::memory_order_relaxed);
  if (measured) Record(*load.workload, kind, latency, result);
}

void LoadWorker::Record(Workload& workload, const std::string& kind, absl::Duration latency,
                        const AttendResult& result) {
  Series& series = result_.series[kind];
  const Timing& timing = result.timing;
  const uint64_t phases[] = {timing.receive_ns, timing.queue_ns, timing.copy_in_ns,
                             timing.kernel_ns, timing.copy_out_ns};
  for (size_t i = 0; i < kPhases.size(); ++i) {
    series.phase_us[i].push_back(static_cast<float>(phases[i]) * 1e-3f);
  }
  const float latency_us = Microseconds(latency);
  series.latency_us.push_back(latency_us);
  series.outside_kernel_us.push_back(latency_us - static_cast<float>(timing.kernel_ns) * 1e-3f);
  series.flop += workload.RequestFlop();
  for (const SpanShape& span : workload.request().spans) {
    series.query_rows += span.query_rows;
  }
  series.request_bytes += result.request_bytes;
  series.response_bytes += result.response_bytes;
}

void LoadWorker::RecordError(const absl::Status& status, absl::Time due) {
  shared_->failed.fetch_add(1, std::memory_order_relaxed);
  if (due >= shared_->measure_start) {
    ++result_.errors[absl::StatusCodeToString(status.code())];
    if (result_.first_error.empty()) result_.first_error = status.ToString();
  }
  absl::SleepFor(kPauseAfterError);
}

void LoadWorker::EchoOnce() {
  if (echo_payload_.empty()) {  // the first turn is never Echo's: a request was prepared
    const AttendRequest& request = loads_[0].workload->request();
    for (const auto tensor : {request.query, request.key, request.value}) {
      echo_payload_.insert(echo_payload_.end(), tensor.begin(), tensor.end());
    }
    echo_reply_.resize(request.output.size());
  }
  const absl::Time start = absl::Now();
  const absl::Status status = client_->Echo(echo_payload_, absl::MakeSpan(echo_reply_));
  const absl::Time now = absl::Now();
  if (!status.ok()) {
    RecordError(status, start);
    return;
  }
  if (start >= shared_->measure_start) result_.echo_us.push_back(Microseconds(now - start));
}

absl::Status LoadWorker::CallStream(AttendStream* stream, AttendRequest* request,
                                    AttendResult* result) {
  request->request_id = absl::StrCat(index_, "-", sent_++);
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

}  // namespace flashcore::cli
