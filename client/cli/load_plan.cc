#include "client/cli/load_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "client/cli/inline_workload.h"
#include "client/cli/resident_workload.h"
#include "client/cli/shared_workload.h"

namespace flashcore::cli {
namespace {

constexpr int kPrefillEvery = 4;     // workers of a mixed load
constexpr size_t kSmallBytes = 128;  // of a request without its spans and tensors, at most
constexpr size_t kSpanBytes = 48;    // of a span

ContextShape ShapeOf(const LoadOptions& options) {
  ContextShape shape;
  shape.sequence.num_kv_heads = options.shape.num_kv_heads;
  shape.sequence.head_dim = options.shape.head_dim;
  shape.sequence.dtype = options.shape.dtype;
  shape.sequence.pin = options.resident.pin;
  shape.layout = options.shape.layout;
  return shape;
}

// One decode step of `sequences` sequences with all K/V inline.
AttendRequest InlineStep(const LoadOptions& options, int sequences) {
  AttendRequest request = options.shape;
  request.mask = Mask::Causal();
  request.spans.assign(static_cast<size_t>(sequences), {1, options.resident.context});
  return request;
}

StepPlan PlanOf(const ResidentOptions& resident, bool prefills, int share) {
  StepPlan plan;
  if (prefills) {
    plan.start = resident.fork_from_prefix;
    plan.end = resident.context;
    plan.rows = resident.prefill_rows;
  } else {
    plan.start = resident.context;
    plan.end = plan.start + kDecodeGrowth;
    plan.group = static_cast<uint32_t>(share);
  }
  return plan;
}

}  // namespace

bool Prefills(BenchMode mode, int index, int workers) {
  if (mode != BenchMode::kMixed) return mode == BenchMode::kPrefill;
  return index % kPrefillEvery == kPrefillEvery - 1 ||
         (workers < kPrefillEvery && index == workers - 1);
}

int ShareOf(int64_t sequences, int index, int workers) {
  return static_cast<int>(sequences / workers + (index < sequences % workers ? 1 : 0));
}

absl::Status CheckAgainstServer(const LoadOptions& options, Client* client) {
  if (options.mode == BenchMode::kAttend || options.mode == BenchMode::kPrefill) {
    return absl::OkStatus();
  }
  const absl::StatusOr<v1::GetServerInfoResponse> info = client->GetServerInfo();
  if (!info.ok()) return info.status();
  const int share = ShareOf(options.resident.sequences, 0, options.concurrency);
  const uint64_t max_spans = info->limits().max_spans();
  if (max_spans > 0 && static_cast<uint64_t>(share) > max_spans) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "--sequences: %d in one request, over the server's max_spans of %d; want more "
        "--concurrency or fewer --sequences",
        share, max_spans));
  }
  if (!options.resident.compare_inline) return absl::OkStatus();
  const AttendRequest request = InlineStep(options, share);
  const size_t bytes = request.QueryBytes() + 2 * request.KvBytes() + kSmallBytes +
                       request.spans.size() * kSpanBytes;
  uint64_t limit = options.client.max_message_bytes;
  if (info->limits().max_message_bytes() > 0) {
    limit = std::min<uint64_t>(limit, info->limits().max_message_bytes());
  }
  if (bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "--compare_inline: a decode step of %d sequences with %d rows inline has %.1f MiB, over the "
      "max_message_bytes of %.1f MiB; want more --concurrency, fewer --sequences or a shorter "
      "--context",
      share, options.resident.context, static_cast<double>(bytes) / 0x1p20,
      static_cast<double>(limit) / 0x1p20));
}

std::unique_ptr<SharedPrefix> MakePrefix(const LoadOptions& options, Client* client) {
  if (options.mode == BenchMode::kAttend || options.resident.fork_from_prefix == 0) return nullptr;
  return std::make_unique<SharedPrefix>(client, ShapeOf(options),
                                        options.resident.fork_from_prefix);
}

namespace {

std::vector<WorkerLoad> MakeTravellingLoads(const LoadOptions& options, int index, Client* client,
                                            SharedPrefix* prefix) {
  const uint64_t seed = static_cast<uint64_t>(index) + 1;
  std::vector<WorkerLoad> loads;
  if (options.mode == BenchMode::kAttend) {
    loads.push_back({"attend", std::make_unique<InlineWorkload>(options.shape, seed)});
    return loads;
  }
  const ResidentOptions& resident = options.resident;
  const int share = ShareOf(resident.sequences, index, options.concurrency);
  const bool prefills = Prefills(options.mode, index, options.concurrency);
  std::vector<ResidentContext> contexts;
  for (int i = 0; i < share; ++i) {
    // Different content for every sequence, and from SharedPrefix::kSeed.
    contexts.emplace_back(client, prefix, ShapeOf(options),
                          (seed << 32) + static_cast<uint64_t>(i));
  }
  loads.push_back({prefills ? "prefill" : "decode",
                   std::make_unique<ResidentWorkload>(
                       options.shape, PlanOf(resident, prefills, share), std::move(contexts))});
  if (resident.compare_inline && !prefills) {
    loads.push_back({"inline", std::make_unique<InlineWorkload>(InlineStep(options, share), seed)});
  }
  return loads;
}

}  // namespace

std::vector<WorkerLoad> MakeLoads(const LoadOptions& options, int index, Client* client,
                                  SharedPrefix* prefix) {
  std::vector<WorkerLoad> loads = MakeTravellingLoads(options, index, client, prefix);
  if (!options.shared_memory) return loads;
  for (WorkerLoad& load : loads) {
    load.workload = std::make_unique<SharedWorkload>(client, std::move(load.workload));
  }
  return loads;
}

}  // namespace flashcore::cli
