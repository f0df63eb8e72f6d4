#include "client/cli/load_worker.h"

#include <sys/prctl.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cli/oracle.h"

namespace flashcore::cli {
namespace {

constexpr absl::Duration kSlice = absl::Milliseconds(250);           // of Attend, then of Echo
constexpr absl::Duration kPauseAfterError = absl::Milliseconds(10);  // a dead server fails fast
constexpr size_t kProbes = 16;
constexpr uint32_t kSpotCheckRows = 4;
// Looser than verify's 2: the spot check has few rows, and precision is not what a bench measures.
constexpr double kSpotCheckFactor = 4;

float Microseconds(absl::Duration duration) {
  return static_cast<float>(absl::ToDoubleMicroseconds(duration));
}

}  // namespace

LoadWorker::LoadWorker(int index, LoadShared* shared, Client* client, AttendStream* stream)
    : index_(index),
      shared_(shared),
      client_(client),
      stream_(stream),
      random_(static_cast<uint64_t>(index) + 1),
      problem_(shared->options->shape, /*want_lse=*/false, /*magnitude=*/1, &random_) {
  const size_t elements = problem_.output().size();
  for (size_t i = 0; i < kProbes; ++i) {
    probes_.push_back(i * (elements - 1) / (kProbes - 1));
  }
  if (shared->options->echo) {
    const AttendRequest& request = problem_.request();
    for (const auto tensor : {request.query, request.key, request.value}) {
      echo_payload_.insert(echo_payload_.end(), tensor.begin(), tensor.end());
    }
    echo_reply_.resize(request.output.size());
  }
}

void LoadWorker::Run() {
  // The default slack of 50 us would show as latency in an open loop.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  const LoadOptions& options = *shared_->options;
  if (options.rate > 0) {
    absl::Time due;
    while (NextDue(&due)) AttendOnce(due);
    return;
  }
  for (absl::Time now = absl::Now(); now < shared_->end; now = absl::Now()) {
    const int64_t slice = (now - shared_->start) / kSlice;
    if (options.echo && slice % 2 == 1) {
      EchoOnce();
    } else {
      AttendOnce(now);
    }
  }
}

bool LoadWorker::NextDue(absl::Time* due) {
  while (true) {
    const uint64_t number = shared_->next_due.fetch_add(1);
    *due = shared_->start + absl::Seconds(static_cast<double>(number) / shared_->options->rate);
    if (*due >= shared_->end) return false;
    const absl::Time now = absl::Now();
    if (now < shared_->end) {
      absl::SleepFor(*due - now);
      return true;
    }
    if (*due >= shared_->measure_start) ++result_.not_sent;
  }
}

void LoadWorker::AttendOnce(absl::Time due) {
  Poison();
  AttendResult result;
  if (shared_->options->rate == 0) due = absl::Now();
  const absl::Status status = Call(&result);
  const absl::Time now = absl::Now();
  if (!status.ok()) {
    RecordError(status, due);
    return;
  }
  if (!ReplyIsRight()) {
    ++result_.wrong_replies;
    shared_->failed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Record(due, now, result);
}

void LoadWorker::Record(absl::Time due, absl::Time now, const AttendResult& result) {
  shared_->finished.fetch_add(1, std::memory_order_relaxed);
  if (due < shared_->measure_start) return;
  const float latency = Microseconds(now - due);
  const Timing& timing = result.timing;
  const uint64_t phases[] = {timing.receive_ns, timing.queue_ns, timing.copy_in_ns,
                             timing.kernel_ns, timing.copy_out_ns};
  for (size_t i = 0; i < kPhases.size(); ++i) {
    result_.phase_us[i].push_back(static_cast<float>(phases[i]) * 1e-3f);
  }
  result_.attend_us.push_back(latency);
  result_.outside_kernel_us.push_back(latency - static_cast<float>(timing.kernel_ns) * 1e-3f);
  result_.request_bytes = result.request_bytes;
  result_.response_bytes = result.response_bytes;
  attend_seconds_ += latency * 1e-6;
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
  const absl::Time start = absl::Now();
  const absl::Status status = client_->Echo(echo_payload_, absl::MakeSpan(echo_reply_));
  const absl::Time now = absl::Now();
  if (!status.ok()) {
    RecordError(status, start);
    return;
  }
  if (start >= shared_->measure_start) result_.echo_us.push_back(Microseconds(now - start));
}

absl::Status LoadWorker::Call(AttendResult* result) {
  return stream_ == nullptr ? client_->Attend(problem_.request(), result) : CallStream(result);
}

absl::Status LoadWorker::CallStream(AttendResult* result) {
  problem_.request().request_id = absl::StrCat(index_, "-", sent_++);
  absl::Notification done;
  absl::Status answer;
  const absl::Status sent =
      stream_->Send(problem_.request(), [&](absl::Status status, AttendResult from_stream) {
        answer = std::move(status);
        *result = std::move(from_stream);
        done.Notify();
      });
  if (!sent.ok()) return sent;
  done.WaitForNotification();
  return answer;
}

void LoadWorker::Poison() {
  for (const size_t probe : probes_) problem_.output()[probe] = kNanBits;
}

bool LoadWorker::ReplyIsRight() {
  std::vector<uint16_t>& output = problem_.output();
  if (expected_.empty()) {
    if (!Compare(SpotCheckBatch(problem_.request(), kSpotCheckRows)).Within(kSpotCheckFactor)) {
      return false;
    }
    for (const size_t probe : probes_) expected_.push_back(output[probe]);
  }
  for (size_t i = 0; i < probes_.size(); ++i) {
    if (output[probes_[i]] != expected_[i]) return false;
  }
  return true;
}

}  // namespace flashcore::cli
