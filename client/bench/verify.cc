// flashcore verify: random shapes against the float64 reference.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "client/bench/commands.h"
#include "client/bench/reply_check.h"
#include "client/bench/verify_case.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(int32_t, cases, 100, "number of random cases");
ABSL_FLAG(uint64_t, seed, 0, "seed of shapes and inputs; 0: a new random one, which is printed");

namespace flashcore::cli {
namespace {

constexpr double kErrorFactor = 2;
constexpr double kFloat16SumsError = 2e-2;  // of O and LSE, with V in [-1, 1]
// RMS error of O, divided by the RMS of O. Sums of 33,000 rows in float16 cost less than 1e-2.
constexpr double kFloat16SumsRelative = 3e-2;

struct Outcome {
  absl::Status status;
  Errors errors;  // with each_span: of the worst span
  bool ok = false;
};

Outcome RunCase(const Case& c, bool float16_sums, Client* client, std::mt19937_64* random) {
  RandomRequest problem = MakeProblem(c, random);
  Outcome outcome;
  outcome.status = Send(c, client, &problem);
  if (!outcome.status.ok()) return outcome;
  outcome.ok = true;
  const KernelBatch whole =
      AsStored(ToKernelBatch(problem.request()), c.kv_dtype, c.shape.precision);
  std::vector<KernelBatch> parts = {whole};
  if (c.each_span) {
    parts.clear();
    for (const kernels::Span& span : whole.spans) parts.push_back({whole.geometry, {span}});
  }
  for (const KernelBatch& part : parts) {
    const Errors errors = Compare(part);
    const bool first = &part == &parts.front();
    if (first || errors.RmsRatio() > outcome.errors.RmsRatio()) outcome.errors = errors;
    outcome.ok &= float16_sums ? errors.WithinBound(kFloat16SumsError, kFloat16SumsRelative)
                               : errors.Within(kErrorFactor);
  }
  return outcome;
}

void PrintCase(int number, const Case& c, const Outcome& outcome) {
  if (!outcome.status.ok()) {
    std::printf("%4d FAILED  %s\n     %s\n", number, Describe(c).c_str(),
                outcome.status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
    return;
  }
  const Errors& e = outcome.errors;
  std::printf("%4d %s error %8.2e unfused %8.2e ratio %4.2f rms %4.2f", number,
              outcome.ok ? "ok    " : "FAILED", e.result, e.unfused, e.Ratio(), e.RmsRatio());
  if (c.lse) std::printf(" lse %7.1e/%7.1e", e.result_lse, e.unfused_lse);
  std::printf("  %s\n", Describe(c).c_str());
}

nlohmann::ordered_json CaseJson(const Case& c, const Outcome& outcome) {
  nlohmann::ordered_json json = {{"case", Describe(c)}, {"ok", outcome.ok}};
  if (!outcome.status.ok()) {
    json["status"] = outcome.status.ToString(absl::StatusToStringMode::kWithNoExtraData);
    return json;
  }
  json["error"] = outcome.errors.result;
  json["unfused_error"] = outcome.errors.unfused;
  json["ratio"] = outcome.errors.Ratio();
  json["rms_ratio"] = outcome.errors.RmsRatio();
  if (c.lse) {
    json["lse_error"] = outcome.errors.result_lse;
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
    const Case c = RandomCase(server, i, &random);
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
                        server.float16_sums
                            ? "the bounds of float16 sums"
                            : "twice the error of unfused attention plus one rounding",
                        worst, seed, elapsed.count(), failed == 0 ? "" : ": FAILED"));
  return failed == 0 ? kExitOk : kExitFailure;
}

}  // namespace

Command VerifyCommand() {
  return {
      "verify",
      "compares random requests with a float64 reference",
      "Sends random requests (dtypes, head_dims, grouped heads, layouts, masks, ragged spans, "
      "lengths around the tile and up to 33,000 K/V rows, K/V inline and resident, shared "
      "prefixes, "
      "large magnitudes, LSE) and computes the same here in float64. Four of ten cases create "
      "sequences, and delete them; together they take at most a quarter of the free K/V memory. A "
      "case passes if the server's errors, the largest and the root mean square, are at most twice "
      "those of unfused attention at the same precision, and 2^-7 of the largest |V|. If the "
      "server has kernels with products of INT8 codes, cases over INT8 K/V accept them, too: then "
      "the bounds are larger by what rounding Q, or P, may cost, and there are no large "
      "magnitudes. A server that "
      "sums in float16 gets no large magnitudes; its largest error may be 2e-2, and the root mean "
      "square 3% of the output's. Each line has both errors, their ratios, and the case, with "
      "rows=QUERY/KV for each span.",
      {"cases", "seed"},
      RunVerify};
}

}  // namespace flashcore::cli
