#include "client/cli/load.h"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cli/workload.h"

namespace flashcore::cli {
namespace {

constexpr std::chrono::milliseconds kTurn(50);
constexpr std::chrono::milliseconds kPauseAfterError(10);  // a dead server fails fast
constexpr int kPrefillEvery = 4;                           // workers of a mixed load

using Clients = std::vector<std::unique_ptr<Client>>;

std::atomic<bool> interrupted{false};

// From now on the first SIGINT or SIGTERM sets `interrupted`; a second one has its default effect.
void CatchInterrupts() {
  interrupted = false;
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

// What the workers share. The times are set after the setup, before the workers run.
struct Shared {
  const LoadOptions& options;
  std::optional<Sequence> prefix = {};    // null: nothing is forked
  SteadyTime start = {};                  // of the warmup
  SteadyTime window_start = {};           // of what is measured
  SteadyTime end = {};                    // no request starts later
  uint64_t due_requests = 0;              // open loop: from start to end
  std::atomic<uint64_t> next_request{0};  // open loop
  absl::Mutex mutex = {};
  LoadResult result ABSL_GUARDED_BY(mutex) = {};

  SteadyTime Now() const { return options.clock.now(); }
};

// One thread of a load. Used by one thread at a time.
class Worker {
 public:
  Worker(int index, Shared* shared, Client* client)
      : index_(index), shared_(shared), client_(client) {
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
    {
      absl::MutexLock lock(&shared->mutex);
      for (const Turn& turn : turns_) shared->result.series[turn.kind];  // even if nothing succeeds
    }
    if (options.echo) turns_.push_back({"echo", nullptr});
  }

  // Calls `step` of every workload. The first error.
  absl::Status Each(absl::Status (Workload::*step)()) {
    absl::Status status;
    for (const auto& workload : workloads_) status.Update(((*workload).*step)());
    return status;
  }

  // Sends on `stream`; null: in unary calls.
  void Run(AttendStream* stream) {
    // The default slack of 50 us would show as latency in an open loop.
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    while (!interrupted) {
      const SteadyTime now = shared_->Now();
      if (now >= shared_->end) return;
      const auto slice = static_cast<size_t>((now - shared_->start) / kTurn);
      const Turn& turn = turns_[slice % turns_.size()];
      if (!Prepare(turn)) continue;
      const std::optional<SteadyTime> due = NextDue();
      if (!due.has_value()) return;
      turn.workload == nullptr ? SendEcho(*due) : Send(turn, turn.unary ? nullptr : stream, *due);
    }
  }

 private:
  struct Turn {
    const char* kind;
    Workload* workload;  // null: echo
    bool unary = false;  // even if there is a stream
  };

  void AddTurn(const char* kind, std::unique_ptr<Workload> workload) {
    turns_.push_back({kind, workload.get()});
    workloads_.push_back(std::move(workload));
  }

  // False, and the error is counted, if there is nothing to send.
  bool Prepare(const Turn& turn) {
    if (turn.workload == nullptr && !echo_payload_.empty()) return true;
    Workload* const workload = turn.workload == nullptr ? turns_[0].workload : turn.workload;
    const absl::Status status = workload->Prepare();
    if (!status.ok()) RecordError(status, shared_->Now());
    if (!status.ok() || turn.workload != nullptr) return status.ok();
    const AttendRequest& request = workload->request();
    for (const auto tensor : {request.query, request.key, request.value}) {
      echo_payload_.insert(echo_payload_.end(), tensor.begin(), tensor.end());
    }
    echo_reply_.resize(request.output.size());
    return true;
  }

  // When the next request is due, after a sleep until then. None if all were sent.
  std::optional<SteadyTime> NextDue() {
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

  void Send(const Turn& turn, AttendStream* stream, SteadyTime due) {
    AttendResult result;
    AttendRequest& request = turn.workload->request();
    const absl::Status status = stream == nullptr ? client_->Attend(request, &result)
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

  absl::Status SendOnStream(AttendStream* stream, AttendRequest* request, AttendResult* result) {
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

  void SendEcho(SteadyTime start) {
    const absl::Status status = client_->Echo(echo_payload_, absl::MakeSpan(echo_reply_));
    const SteadyTime end = shared_->Now();
    if (!status.ok()) return RecordError(status, start);
    absl::MutexLock lock(&shared_->mutex);
    Record(&shared_->result.echo, {}, start, end);
  }

  // Counts a request that took from `due` to `end`. False if it gives no sample.
  bool Record(Series* series, const Timing& timing, SteadyTime due, SteadyTime end) {
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

  void RecordError(const absl::Status& status, SteadyTime due) {
    if (due >= shared_->window_start) {
      absl::MutexLock lock(&shared_->mutex);
      LoadResult& result = shared_->result;
      ++result.errors[absl::StatusCodeToString(status.code())];
      if (result.first_error.empty()) result.first_error = status.ToString();
    }
    shared_->options.clock.sleep_until(shared_->Now() + kPauseAfterError);
  }

  const int index_;
  Shared* const shared_;
  Client* const client_;
  std::vector<std::unique_ptr<Workload>> workloads_;
  std::vector<Turn> turns_;  // an open loop has just one
  std::vector<std::byte> echo_payload_, echo_reply_;
  uint64_t sent_on_stream_ = 0;
};

using Workers = std::vector<std::unique_ptr<Worker>>;

absl::StatusOr<Clients> OpenConnections(const LoadOptions& options) {
  Clients clients;
  for (int i = 0; i < options.connections; ++i) {
    ClientOptions client_options = options.client;
    client_options.retry.max_attempts = 1;  // a retry would hide an error in a latency
    auto client = Client::Create(options.target, std::move(client_options));
    if (!client.ok()) return client.status();
    if (!(*client)->WaitForConnected(absl::Now() + options.client.timeout)) {
      return absl::UnavailableError(absl::StrCat("cannot connect to ", options.target));
    }
    clients.push_back(*std::move(client));
  }
  return clients;
}

// Calls `step` with the index of every worker, each on its own thread, and waits. The first error.
absl::Status OnAllThreads(size_t workers, const std::function<absl::Status(size_t)>& step) {
  absl::Mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers; ++i) {
    threads.emplace_back([&, i] {
      const absl::Status status = step(i);
      absl::MutexLock lock(&mutex);
      first.Update(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

// Warmup and measurement.
void Measure(const Clients& clients, const Workers& workers, Shared* shared) {
  const LoadOptions& options = shared->options;
  StreamOptions stream_options;
  stream_options.max_inflight = static_cast<size_t>(options.concurrency);
  // A server that stops answering must not hang the load.
  stream_options.deadline =
      absl::Now() + options.warmup + options.duration + options.client.timeout;
  std::vector<std::unique_ptr<AttendStream>> streams(clients.size());
  for (size_t i = 0; options.stream && i < clients.size(); ++i) {
    streams[i] = clients[i]->OpenStream(stream_options);
  }
  // Requests that are due within `duration` from the start.
  const auto due_within = [&](absl::Duration duration) {
    return static_cast<uint64_t>(std::ceil(options.rate * absl::ToDoubleSeconds(duration)));
  };
  shared->due_requests = due_within(options.warmup + options.duration);
  shared->start = shared->Now();
  shared->window_start = shared->start + absl::ToChronoNanoseconds(options.warmup);
  shared->end = shared->window_start + absl::ToChronoNanoseconds(options.duration);
  OnAllThreads(workers.size(), [&](size_t i) {
    workers[i]->Run(streams[i % streams.size()].get());
    return absl::OkStatus();
  }).IgnoreError();  // there is none

  const SteadyTime window_end = std::min(shared->Now(), shared->end);
  absl::MutexLock lock(&shared->mutex);
  LoadResult& result = shared->result;
  result.window_seconds = std::chrono::duration<double>(window_end - shared->window_start).count();
  result.interrupted = interrupted;
  const uint64_t sent = std::max(shared->next_request.load(), due_within(options.warmup));
  if (!result.interrupted) {
    result.not_sent = shared->due_requests - std::min(shared->due_requests, sent);
  }
}

}  // namespace

uint64_t LoadResult::Ok() const {
  uint64_t ok = 0;
  for (const auto& [kind, of_kind] : series) ok += of_kind.samples.size();
  return ok;
}

uint64_t LoadResult::Failed() const {
  uint64_t failed = wrong_replies;
  for (const auto& [code, count] : errors) failed += count;
  return failed;
}

bool Prefills(BenchMode mode, int index, int workers) {
  if (mode != BenchMode::kMixed) return mode == BenchMode::kPrefill;
  return index % kPrefillEvery == kPrefillEvery - 1 ||
         (workers < kPrefillEvery && index == workers - 1);
}

int ShareOf(int64_t sequences, int index, int workers) {
  return static_cast<int>(sequences / workers + (index < sequences % workers ? 1 : 0));
}

double AttentionFlop(const AttendRequest& shape, uint64_t query_rows, uint64_t kv_rows) {
  const auto n = static_cast<double>(query_rows);
  const auto m = static_cast<double>(kv_rows);
  // Causal: row i of n sees i + m - n + 1 of m rows, which leaves out n (n - 1) / 2 pairs. If
  // m < n, the first n - m rows see nothing, which leaves m (m + 1) / 2 pairs.
  double pairs = n * m;
  if (shape.mask.kind == Mask::Kind::kCausal) {
    pairs = n <= m ? n * m - n * (n - 1) / 2 : m * (m + 1) / 2;
  }
  return 4 * pairs * shape.num_heads * shape.head_dim;
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  CatchInterrupts();
  Shared shared{options};
  const absl::StatusOr<Clients> clients = OpenConnections(options);
  if (!clients.ok()) return clients.status();
  if (options.mode != BenchMode::kAttend && options.resident.fork_from_prefix > 0) {
    absl::StatusOr<Sequence> prefix = CreatePrefix(options, clients->front().get());
    if (!prefix.ok()) return prefix.status();
    shared.prefix = *std::move(prefix);
  }
  Workers workers;
  for (int i = 0; i < options.concurrency; ++i) {
    Client* const client = (*clients)[static_cast<size_t>(i % options.connections)].get();
    workers.push_back(std::make_unique<Worker>(i, &shared, client));
  }
  const absl::Status status =
      OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Each(&Workload::Setup); });
  if (status.ok()) Measure(*clients, workers, &shared);
  absl::Status cleanup =
      OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Each(&Workload::Teardown); });
  if (shared.prefix.has_value()) cleanup.Update(shared.prefix->Delete());
  if (!status.ok()) return status;
  if (!cleanup.ok()) {
    std::fprintf(stderr, "flashcore: sequences are left to expire: %s\n",
                 cleanup.ToString().c_str());
  }
  absl::MutexLock lock(&shared.mutex);
  return std::move(shared.result);
}

}  // namespace flashcore::cli
