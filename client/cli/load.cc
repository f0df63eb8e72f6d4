#include "client/cli/load.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cli/load_plan.h"
#include "client/cli/load_worker.h"

namespace flashcore::cli {
namespace {

// While one lives, the first SIGINT or SIGTERM sets a flag; the second has its default effect.
class InterruptFlag {
 public:
  InterruptFlag() {
    flag_ = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { flag_ = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &old_int_);
    sigaction(SIGTERM, &action, &old_term_);
  }
  ~InterruptFlag() {
    sigaction(SIGINT, &old_int_, nullptr);
    sigaction(SIGTERM, &old_term_, nullptr);
  }
  InterruptFlag(const InterruptFlag&) = delete;
  InterruptFlag& operator=(const InterruptFlag&) = delete;

  const std::atomic<bool>& flag() const { return flag_; }

 private:
  static inline std::atomic<bool> flag_{false};
  struct sigaction old_int_ = {}, old_term_ = {};
};

using Clients = std::vector<std::unique_ptr<Client>>;
using Workers = std::vector<std::unique_ptr<LoadWorker>>;

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

// One for each client, null without --stream.
std::vector<std::unique_ptr<AttendStream>> OpenStreams(const LoadOptions& options,
                                                       const Clients& clients) {
  std::vector<std::unique_ptr<AttendStream>> streams(clients.size());
  if (!options.stream) return streams;
  StreamOptions stream_options;
  stream_options.max_inflight = static_cast<size_t>(options.concurrency);
  // A server that stops answering must not hang the bench.
  stream_options.deadline =
      absl::Now() + options.warmup + options.duration + options.client.timeout;
  for (size_t i = 0; i < clients.size(); ++i) streams[i] = clients[i]->OpenStream(stream_options);
  return streams;
}

// Calls `step` with the index of every worker, each on its own thread, and waits. The first error,
// if any.
absl::Status OnAllThreads(
    size_t workers, const std::function<absl::Status(size_t)>& step,
    const std::function<void()>& meanwhile = [] {}) {
  absl::Mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers; ++i) {
    threads.emplace_back([&, i] {
      absl::Status status = step(i);
      absl::MutexLock lock(&mutex);
      first.Update(status);
    });
  }
  meanwhile();
  for (std::thread& thread : threads) thread.join();
  return first;
}

void ShowProgress(const LoadShared& shared) {
  const double whole = absl::ToDoubleSeconds(shared.end - shared.start);
  for (absl::Time now = absl::Now(); !shared.Over(now); now = absl::Now()) {
    std::fprintf(stderr, "\r%s %4.1f of %.1f s, %llu ok, %llu failed ",
                 now < shared.measure_start ? "warming up" : "measuring ",
                 absl::ToDoubleSeconds(now - shared.start), whole,
                 static_cast<unsigned long long>(shared.finished.load()),
                 static_cast<unsigned long long>(shared.failed.load()));
    absl::SleepFor(std::min(absl::Milliseconds(200), shared.end - now));
  }
  std::fprintf(stderr, "\r\x1b[K");
}

void Append(const std::vector<float>& from, std::vector<float>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

void Merge(const Series& from, Series* to) {
  Append(from.latency_us, &to->latency_us);
  Append(from.outside_kernel_us, &to->outside_kernel_us);
  for (size_t i = 0; i < kPhases.size(); ++i) Append(from.phase_us[i], &to->phase_us[i]);
  to->flop += from.flop;
  to->query_rows += from.query_rows;
  to->request_bytes += from.request_bytes;
  to->response_bytes += from.response_bytes;
  to->per_second += from.per_second;
}

void Merge(const LoadResult& from, LoadResult* to) {
  for (const auto& [kind, series] : from.series) Merge(series, &to->series[kind]);
  Append(from.echo_us, &to->echo_us);
  for (const auto& [code, count] : from.errors) to->errors[code] += count;
  if (to->first_error.empty()) to->first_error = from.first_error;
  to->wrong_replies += from.wrong_replies;
  to->not_sent += from.not_sent;
}

// Setup, warmup and measurement.
absl::Status Drive(const LoadOptions& options, const Clients& clients, const Workers& workers,
                   LoadShared* shared) {
  absl::Status status = OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Setup(); });
  if (!status.ok()) return status;
  const auto streams = OpenStreams(options, clients);
  shared->start = absl::Now();
  shared->measure_start = shared->start + options.warmup;
  shared->end = shared->measure_start + options.duration;
  const auto run = [&](size_t i) {
    workers[i]->Run(streams[i % streams.size()].get());
    return absl::OkStatus();
  };
  return OnAllThreads(workers.size(), run, [&] {
    if (options.progress) ShowProgress(*shared);
  });
}

}  // namespace

uint64_t LoadResult::Ok() const {
  uint64_t ok = 0;
  for (const auto& entry : series) ok += entry.second.latency_us.size();
  return ok;
}

uint64_t LoadResult::Failed() const {
  uint64_t failed = wrong_replies;
  for (const auto& [code, count] : errors) failed += count;
  return failed;
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  const InterruptFlag interrupt;
  const absl::StatusOr<Clients> clients = OpenConnections(options);
  if (!clients.ok()) return clients.status();
  Client* const first = clients->front().get();
  if (absl::Status status = CheckAgainstServer(options, first); !status.ok()) return status;

  LoadShared shared;
  shared.options = &options;
  shared.interrupted = &interrupt.flag();
  const std::unique_ptr<SharedPrefix> prefix = MakePrefix(options, first);
  Workers workers;
  for (int i = 0; i < options.concurrency; ++i) {
    Client* const client = (*clients)[static_cast<size_t>(i % options.connections)].get();
    workers.push_back(std::make_unique<LoadWorker>(i, &shared, client,
                                                   MakeLoads(options, i, client, prefix.get())));
  }
  const absl::Status status = Drive(options, *clients, workers, &shared);
  absl::Status cleanup =
      OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Teardown(); });
  if (prefix != nullptr) cleanup.Update(prefix->Delete());
  if (!status.ok()) return status;

  LoadResult result;
  for (const auto& worker : workers) Merge(worker->result(), &result);
  result.interrupted = interrupt.flag().load();
  if (!cleanup.ok()) {
    std::fprintf(stderr, "flashcore: sequences are left to expire: %s\n",
                 cleanup.ToString().c_str());
  }
  return result;
}

}  // namespace flashcore::cli
