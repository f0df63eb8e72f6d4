// flashcore verify: random shapes against the float64 reference.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "client/cli/oracle.h"
#include "client/cpp/codec.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(int32_t, cases, 100, "number of random cases");
ABSL_FLAG(uint64_t, seed, 0, "seed of shapes and inputs; 0: a new random one, which is printed");

namespace flashcore::cli {
namespace {

// Most multiply-adds of a case, so that the float64 reference takes only some milliseconds.
constexpr uint64_t kMaxCaseWork = 3'000'000;
constexpr double kErrorFactor = 2;
constexpr double kFloat16SumsError = 2e-2;  // of O and LSE, with V in [-1, 1]

// What the server's kernels can compute.
struct Abilities {
  explicit Abilities(const v1::GetServerInfoResponse& info) : limits(info.limits()) {
    for (const v1::KernelInfo& kernel : info.kernels()) {
      const DType dtype = client::FromProto(kernel.dtype());
      if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
      float16_sums |= kernel.accumulate() == "float16";
    }
  }

  v1::Limits limits;
  std::vector<DType> dtypes;
  bool float16_sums = false;  // they have their own error bound, and overflow
};

struct Case {
  AttendRequest shape;
  bool lse = false;
  float magnitude = 1;
};

template <typename T>
T Pick(const std::vector<T>& values, std::mt19937_64* random) {
  return values[(*random)() % values.size()];
}

uint64_t Work(const AttendRequest& shape) {
  uint64_t pairs = 0;
  for (const SpanShape& span : shape.spans) pairs += uint64_t{span.query_rows} * span.kv_rows;
  return pairs * shape.num_heads * shape.head_dim;
}

Mask RandomMask(std::mt19937_64* random) {
  switch ((*random)() % 4) {
    case 0:
      return Mask::None();
    case 1:
      return Mask::SlidingWindow(Pick<int32_t>({0, 1, 17, 63, 64, 100}, random),
                                 Pick<int32_t>({0, 1, 64}, random));
    default:
      return Mask::Causal();
  }
}

// Lengths around the 64-row tile, where kernels fail first, and a random one.
uint32_t RandomRows(bool may_be_zero, std::mt19937_64* random) {
  const uint32_t any = 1 + static_cast<uint32_t>((*random)() % 300);
  const uint32_t rows =
      Pick<uint32_t>({0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 257, any, any, any}, random);
  return rows == 0 && !may_be_zero ? 1 : rows;
}

Case RandomCase(const Abilities& server, std::mt19937_64* random) {
  const v1::Limits& limits = server.limits;
  Case out;
  AttendRequest& shape = out.shape;
  shape.dtype = Pick(server.dtypes, random);
  shape.layout = Pick<Layout>({Layout::kNHD, Layout::kHND}, random);
  shape.mask = RandomMask(random);
  if ((*random)() % 4 == 0) shape.softmax_scale = Pick<float>({0.0f, 0.05f, -0.1f, 0.5f}, random);
  out.lse = (*random)() % 2 == 0;
  out.magnitude = server.float16_sums ? 1 : Pick<float>({1, 1, 1, 4, 16}, random);
  const std::vector<uint32_t> head_dims(limits.head_dims().begin(), limits.head_dims().end());
  do {
    shape.head_dim = Pick(head_dims, random);
    shape.num_kv_heads = Pick<uint32_t>({1, 2, 3, 4}, random);
    shape.num_heads = shape.num_kv_heads * Pick<uint32_t>({1, 1, 2, 4, 7, 8}, random);
    const uint32_t max_spans = std::min<uint32_t>(4, std::max<uint32_t>(1, limits.max_spans()));
    shape.spans.clear();
    for (uint64_t i = 0, n = 1 + (*random)() % max_spans; i < n; ++i) {
      shape.spans.push_back({RandomRows(false, random), RandomRows(true, random)});
    }
  } while (Work(shape) > kMaxCaseWork || shape.num_heads > limits.max_heads());
  return out;
}

std::string Describe(const Case& c) {
  std::string spans;
  for (const SpanShape& span : c.shape.spans) {
    absl::StrAppend(&spans, spans.empty() ? "" : ",", span.query_rows, "/", span.kv_rows);
  }
  return absl::StrCat(AbslUnparseFlag(c.shape.dtype), " d=", c.shape.head_dim,
                      " h=", c.shape.num_heads, "/", c.shape.num_kv_heads, " ",
                      AbslUnparseFlag(c.shape.layout), " ", AbslUnparseFlag(c.shape.mask),
                      " rows=", spans, " magnitude=", c.magnitude,
                      c.shape.softmax_scale ? absl::StrCat(" scale=", *c.shape.softmax_scale) : "",
                      c.lse ? " lse" : "");
}

struct Outcome {
  absl::Status status;
  Errors errors;
  bool ok = false;
};

Outcome RunCase(const Case& c, bool float16_sums, Client* client, std::mt19937_64* random) {
  RandomRequest problem(c.shape, c.lse, c.magnitude, random);
  Outcome outcome;
  outcome.status = client->Attend(problem.request(), nullptr);
  if (!outcome.status.ok()) return outcome;
  outcome.errors = Compare(ToKernelBatch(problem.request()));
  outcome.ok = float16_sums ? outcome.errors.WithinBound(kFloat16SumsError)
                            : outcome.errors.Within(kErrorFactor);
  return outcome;
}

void PrintCase(int number, const Case& c, const Outcome& outcome) {
  if (!outcome.status.ok()) {
    std::printf("%4d FAILED  %s\n     %s\n", number, Describe(c).c_str(),
                outcome.status.ToString().c_str());
    return;
  }
  const Errors& e = outcome.errors;
  std::printf("%4d %s error %8.2e unfused %8.2e ratio %4.2f", number,
              outcome.ok ? "ok    " : "FAILED", e.server, e.unfused, e.Ratio());
  if (c.lse) std::printf(" lse %7.1e/%7.1e", e.server_lse, e.unfused_lse);
  std::printf("  %s\n", Describe(c).c_str());
}

nlohmann::ordered_json CaseJson(const Case& c, const Outcome& outcome) {
  nlohmann::ordered_json json = {{"case", Describe(c)}, {"ok", outcome.ok}};
  if (!outcome.status.ok()) {
    json["status"] = outcome.status.ToString();
    return json;
  }
  json["error"] = outcome.errors.server;
  json["unfused_error"] = outcome.errors.unfused;
  json["ratio"] = outcome.errors.Ratio();
  if (c.lse) {
    json["lse_error"] = outcome.errors.server_lse;
    json["unfused_lse_error"] = outcome.errors.unfused_lse;
  }
  return json;
}

int RunVerify(Client* client) {
  const int cases = absl::GetFlag(FLAGS_cases);
  if (cases < 1) return FailUsage("--cases: must be at least 1");
  const absl::StatusOr<v1::GetServerInfoResponse> info = client->GetServerInfo();
  if (!info.ok()) return Fail(info.status());
  const Abilities server(*info);
  if (server.limits.head_dims().empty() || server.dtypes.empty()) {
    return Fail(absl::InternalError("the server reports no head_dim or no dtype"));
  }
  uint64_t seed = absl::GetFlag(FLAGS_seed);
  if (seed == 0) seed = std::random_device()();
  std::mt19937_64 random(seed);

  int failed = 0;
  double worst = 0;
  auto json_cases = nlohmann::ordered_json::array();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i <= cases; ++i) {
    const Case c = RandomCase(server, &random);
    const Outcome outcome = RunCase(c, server.float16_sums, client, &random);
    if (!outcome.ok) ++failed;
    if (outcome.status.ok()) worst = std::max(worst, outcome.errors.Ratio());
    json_cases.push_back(CaseJson(c, outcome));
    if (!absl::GetFlag(FLAGS_json)) PrintCase(i, c, outcome);
    if (absl::IsUnavailable(outcome.status)) return Fail(outcome.status);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  Print({{"seed", seed},
         {"cases", cases},
         {"failed", failed},
         {"worst_ratio", worst},
         {"results", json_cases}},
        absl::StrFormat("verify: %d of %d cases within %s, worst ratio %.2f, seed %d, %.1f s%s\n",
                        cases - failed, cases,
                        server.float16_sums ? "2e-2, the bound of float16 sums"
                                            : "twice the error of unfused attention",
                        worst, seed, elapsed.count(), failed == 0 ? "" : ": FAILED"));
  return failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace

Command VerifyCommand() {
  return {
      "verify",
      "compares random requests with a float64 reference",
      "Sends random requests (dtypes, head_dims, grouped heads, layouts, masks, ragged spans, "
      "lengths around the tile, large magnitudes, LSE) and computes the same here in float64. A "
      "case passes if the server's largest absolute error is at most twice that of unfused "
      "attention at the same precision. A server that sums in float16 gets no large magnitudes, "
      "and its error may be at most 2e-2. Each line has both errors, their ratio, and the case, "
      "with rows=QUERY/KV for each span.",
      {"cases", "seed"},
      RunVerify};
}

}  // namespace flashcore::cli
