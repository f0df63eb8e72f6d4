#include "client/cli/load.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/load_worker.h"

namespace flashcore::cli {
namespace {

struct Connection {
  std::unique_ptr<Client> client;
  std::unique_ptr<AttendStream> stream;  // destroyed before its client; null without --stream
};

absl::StatusOr<std::vector<Connection>> OpenConnections(const LoadOptions& options) {
  std::vector<Connection> connections;
  for (int i = 0; i < options.connections; ++i) {
    ClientOptions client_options;
    client_options.timeout = options.timeout;
    client_options.retry.max_attempts = 1;  // a retry would hide an error in a latency
    auto client = Client::Create(options.target, std::move(client_options));
    if (!client.ok()) return client.status();
    if (!(*client)->WaitForConnected(absl::Now() + options.timeout)) {
      return absl::UnavailableError(absl::StrCat("cannot connect to ", options.target));
    }
    Connection connection{*std::move(client), nullptr};
    if (options.stream) {
      StreamOptions stream_options;
      stream_options.max_inflight = static_cast<size_t>(options.concurrency);
      // A server that stops answering must not hang the bench.
      stream_options.deadline = absl::Now() + options.warmup + options.duration + options.timeout;
      connection.stream = connection.client->OpenStream(stream_options);
    }
    connections.push_back(std::move(connection));
  }
  return connections;
}

void ShowProgress(const LoadShared& shared) {
  const double whole = absl::ToDoubleSeconds(shared.end - shared.start);
  for (absl::Time now = absl::Now(); now < shared.end; now = absl::Now()) {
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

void Merge(const LoadResult& from, LoadResult* to) {
  Append(from.attend_us, &to->attend_us);
  Append(from.outside_kernel_us, &to->outside_kernel_us);
  Append(from.echo_us, &to->echo_us);
  for (size_t i = 0; i < kPhases.size(); ++i) Append(from.phase_us[i], &to->phase_us[i]);
  for (const auto& [code, count] : from.errors) to->errors[code] += count;
  if (to->first_error.empty()) to->first_error = from.first_error;
  to->wrong_replies += from.wrong_replies;
  to->not_sent += from.not_sent;
  to->request_bytes = std::max(to->request_bytes, from.request_bytes);
  to->response_bytes = std::max(to->response_bytes, from.response_bytes);
}

}  // namespace

uint64_t LoadResult::Failed() const {
  uint64_t failed = wrong_replies;
  for (const auto& [code, count] : errors) failed += count;
  return failed;
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  absl::StatusOr<std::vector<Connection>> connections = OpenConnections(options);
  if (!connections.ok()) return connections.status();
  LoadShared shared;
  shared.options = &options;
  std::vector<std::unique_ptr<LoadWorker>> workers;
  for (int i = 0; i < options.concurrency; ++i) {
    const Connection& connection = (*connections)[static_cast<size_t>(i % options.connections)];
    workers.push_back(
        std::make_unique<LoadWorker>(i, &shared, connection.client.get(), connection.stream.get()));
  }
  shared.start = absl::Now();
  shared.measure_start = shared.start + options.warmup;
  shared.end = shared.measure_start + options.duration;
  std::vector<std::thread> threads;
  for (const auto& worker : workers) threads.emplace_back([&worker] { worker->Run(); });
  if (options.progress) ShowProgress(shared);
  for (std::thread& thread : threads) thread.join();
  const double wall_seconds = absl::ToDoubleSeconds(absl::Now() - shared.measure_start);

  LoadResult result;
  for (const auto& worker : workers) {
    Merge(worker->result(), &result);
    // Beside echoes only the time spent in Attends counts.
    if (options.echo && worker->attend_seconds() > 0) {
      result.attends_per_second +=
          static_cast<double>(worker->result().attend_us.size()) / worker->attend_seconds();
    }
  }
  if (!options.echo) {
    result.attends_per_second = static_cast<double>(result.attend_us.size()) / wall_seconds;
  }
  return result;
}

double RequestFlops(const AttendRequest& shape) {
  double pairs = 0;
  for (const SpanShape& span : shape.spans) {
    if (shape.mask.kind == Mask::Kind::kNone) {
      pairs += static_cast<double>(span.query_rows) * span.kv_rows;
      continue;
    }
    // Causal: row i of n sees i + m - n + 1 of m rows.
    for (uint32_t i = 0; i < span.query_rows; ++i) {
      const int64_t seen = int64_t{i} + span.kv_rows - span.query_rows + 1;
      pairs += static_cast<double>(std::max<int64_t>(0, seen));
    }
  }
  return 4 * pairs * shape.num_heads * shape.head_dim;
}

}  // namespace flashcore::cli
