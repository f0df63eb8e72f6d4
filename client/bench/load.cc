#include "client/bench/load.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/bench/load_worker.h"
#include "proto/wire/start_thread.h"

namespace flashcore::cli {
namespace {

constexpr int kPrefillEvery = 4;  // workers of a mixed load

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

using Workers = std::vector<std::unique_ptr<Worker>>;

// To `targets` in turn; none if there are no targets.
absl::StatusOr<Clients> OpenConnections(const LoadOptions& options,
                                        const std::vector<std::string>& targets) {
  Clients clients;
  if (targets.empty()) return clients;
  for (int i = 0; i < options.connections; ++i) {
    ClientOptions client_options = options.client;
    client_options.retry.max_attempts = 1;  // a retry would hide an error in a latency
    const std::string& target = targets[static_cast<size_t>(i) % targets.size()];
    auto client = Client::Create(target, std::move(client_options));
    if (!client.ok()) return client.status();
    if (!(*client)->WaitForConnected(absl::Now() + options.client.timeout)) {
      return absl::UnavailableError(absl::StrCat("cannot connect to ", target));
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
    const int error = StartThread(&threads.emplace_back(), [&, i] {
      const absl::Status status = step(i);
      absl::MutexLock lock(&mutex);
      first.Update(status);
    });
    if (error == 0) continue;
    threads.pop_back();
    absl::MutexLock lock(&mutex);
    first.Update(absl::ResourceExhaustedError(NoThreadMessage(error)));
    break;
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

// The version and devices of a server.
std::string Describe(Client* client) {
  const auto info = client->GetServerInfo();
  if (!info.ok())
    return absl::StrCat("unknown: ",
                        info.status().ToString(absl::StatusToStringMode::kWithNoExtraData));
  const auto device = [](std::string* out, const v1::DeviceInfo& of) {
    absl::StrAppend(out, of.id(), of.name().empty() ? "" : " ", of.name());
  };
  return absl::StrCat(info->version(), info->devices().empty() ? "" : ", ",
                      absl::StrJoin(info->devices(), ", ", device));
}

std::vector<Streams> OpenStreams(const Clients& clients, const Clients& compared,
                                 const LoadOptions& options) {
  std::vector<Streams> streams(clients.size());
  if (!options.stream) return streams;
  StreamOptions stream_options;
  stream_options.max_inflight = static_cast<size_t>(options.concurrency);
  // A server that stops answering must not hang the load.
  stream_options.deadline =
      absl::Now() + options.warmup + options.duration + options.client.timeout;
  for (size_t i = 0; i < clients.size(); ++i) {
    streams[i].attend = clients[i]->OpenStream(stream_options);
    if (!compared.empty()) streams[i].compared = compared[i]->OpenStream(stream_options);
  }
  return streams;
}

void SetTurnSeconds(SteadyTime window_end, const Workers& workers, LoadResult* result) {
  TurnTimes times;
  for (const auto& worker : workers) worker->AddTurnTimes(window_end, &times);
  for (const auto& [kind, of_kind] : times) {
    result->series[kind].turn_seconds =
        std::chrono::duration<double>(of_kind.first / of_kind.second).count();
  }
}

// Warmup and measurement.
LoadResult Measure(const Clients& clients, const Clients& compared, const Workers& workers,
                   Shared* shared) {
  const LoadOptions& options = shared->options;
  const std::vector<Streams> streams = OpenStreams(clients, compared, options);
  // Requests that are due within `duration` from the start.
  const auto due_within = [&](absl::Duration duration) {
    return static_cast<uint64_t>(std::ceil(options.rate * absl::ToDoubleSeconds(duration)));
  };
  shared->next_request = 0;
  shared->due_requests = due_within(options.warmup + options.duration);
  shared->start = shared->Now();
  shared->window_start = shared->start + absl::ToChronoNanoseconds(options.warmup);
  shared->end = shared->window_start + absl::ToChronoNanoseconds(options.duration);
  {
    absl::MutexLock lock(&shared->mutex);
    shared->turn = 0;
    shared->turn_end = shared->start + kTurn;
  }
  OnAllThreads(workers.size(), [&](size_t i) {
    workers[i]->Run(streams[i % streams.size()]);
    return absl::OkStatus();
  }).IgnoreError();  // there is none

  const SteadyTime window_end = std::min(shared->Now(), shared->end);
  absl::MutexLock lock(&shared->mutex);
  LoadResult result = std::exchange(shared->result, {});
  SetTurnSeconds(window_end, workers, &result);
  result.window_seconds =
      std::max(std::chrono::duration<double>(window_end - shared->window_start).count(), 0.0);
  result.interrupted = interrupted;
  const uint64_t sent = std::max(shared->next_request.load(), due_within(options.warmup));
  if (!result.interrupted) {
    result.not_sent = shared->due_requests - std::min(shared->due_requests, sent);
  }
  return result;
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
  bool measured = false;
  LoadResult only;
  absl::Status status = RunRounds(
      options, [&] { return !std::exchange(measured, true); },
      [&](const LoadResult& result) { only = result; });
  if (!status.ok()) return status;
  return only;
}

absl::Status RunRounds(const LoadOptions& options, const std::function<bool()>& next,
                       const std::function<void(const LoadResult&)>& done) {
  CatchInterrupts();
  Shared shared{options, interrupted};
  const absl::StatusOr<Clients> clients = OpenConnections(options, options.targets);
  if (!clients.ok()) return clients.status();
  std::vector<std::string> compare_targets;
  if (!options.compare_target.empty()) compare_targets.push_back(options.compare_target);
  const absl::StatusOr<Clients> compared = OpenConnections(options, compare_targets);
  if (!compared.ok()) return compared.status();
  if (options.mode != BenchMode::kAttend && options.resident.fork_from_prefix > 0) {
    absl::StatusOr<Sequence> prefix = CreatePrefix(options, clients->front().get());
    if (!prefix.ok()) return prefix.status();
    shared.prefix = *std::move(prefix);
  }
  Workers workers;
  for (int i = 0; i < options.concurrency; ++i) {
    const auto connection = static_cast<size_t>(i % options.connections);
    workers.push_back(
        std::make_unique<Worker>(i, &shared, (*clients)[connection].get(),
                                 compared->empty() ? nullptr : (*compared)[connection].get()));
  }
  const absl::Status status =
      OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Each(&Workload::Setup); });
  const std::string server = Describe(clients->front().get());
  while (status.ok() && next()) {
    LoadResult result = Measure(*clients, *compared, workers, &shared);
    result.server = server;
    done(result);
    if (interrupted) break;
  }
  absl::Status cleanup =
      OnAllThreads(workers.size(), [&](size_t i) { return workers[i]->Each(&Workload::Teardown); });
  if (shared.prefix.has_value()) cleanup.Update(shared.prefix->Delete());
  if (status.ok() && !cleanup.ok()) {
    std::fprintf(stderr, "flashcore: sequences are left to expire: %s\n",
                 cleanup.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
  }
  return status;
}

}  // namespace flashcore::cli
