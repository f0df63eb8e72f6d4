// flashcore bench and flashcore sequences against a server that attends correctly.
#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/bench/load.h"
#include "client/bench/workload.h"
#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "nlohmann/json.hpp"
#include "tests/client/bench_fixture.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;

TEST_F(BenchTest, DecodeStepsAllSequencesOfAWorkerAtOnce) {
  std::atomic<uint64_t> longest{0}, shortest{1000};
  std::atomic<int> wrong{0};
  auto right = server_.on_attend;
  server_.on_attend = [&](auto* context, const v1::AttendRequest& request, auto* response) {
    if (request.spans_size() > 2 || request.mask().kind() != v1::Mask::KIND_CAUSAL) ++wrong;
    for (const v1::Span& span : request.spans()) {
      if (span.query_rows() != 1 || span.kv_rows() != 1 || !span.has_expected_length()) ++wrong;
      longest = std::max(longest.load(), span.expected_length());
      shortest = std::min(shortest.load(), span.expected_length());
    }
    return right(context, request, response);
  };
  const LoadResult result = RunCalls(300);
  ASSERT_EQ(result.series.size(), 1u);
  const Series& decode = result.series.at("decode");
  EXPECT_GT(decode.samples.size(), 0u);
  EXPECT_GE(decode.query_rows, decode.samples.size());
  EXPECT_GT(decode.ended, 0u);
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(shortest, 70u);
  EXPECT_EQ(longest, 70u + kDecodeGrowth - 1);
}

TEST_F(BenchTest, PrefillGoesFromTheForkPointToTheContext) {
  options_.mode = BenchMode::kPrefill;
  options_.shape.layout = Layout::kHND;
  options_.resident.fork_from_prefix = 10;
  options_.resident.prefill_rows = 25;
  std::set<std::pair<uint64_t, uint32_t>> chunks;
  absl::Mutex mutex;
  auto right = server_.on_attend;
  server_.on_attend = [&](auto* context, const v1::AttendRequest& request, auto* response) {
    {
      absl::MutexLock lock(&mutex);
      for (const v1::Span& span : request.spans()) {
        EXPECT_EQ(span.query_rows(), span.kv_rows());
        chunks.insert({span.expected_length(), span.kv_rows()});
      }
      EXPECT_EQ(request.spans_size(), 1);
    }
    return right(context, request, response);
  };
  const LoadResult result = RunCalls(50);
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  const std::set<std::pair<uint64_t, uint32_t>> want = {{10, 25}, {35, 25}, {60, 10}};
  EXPECT_EQ(chunks, want);
}

TEST_F(BenchTest, MixedReportsBothKindsAndSharesThePrefix) {
  options_.mode = BenchMode::kMixed;
  options_.shape.dtype = DType::kBFloat16;
  options_.resident.fork_from_prefix = 64;
  std::atomic<int> forks{0}, creates{0}, decodes{0}, prefills{0};
  auto right = server_.on_attend;
  server_.on_attend = [&](auto* context, const v1::AttendRequest& request, auto* response) {
    ++(request.spans(0).query_rows() == 1 ? decodes : prefills);
    return right(context, request, response);
  };
  auto fork = server_.on_fork;
  server_.on_fork = [&](auto* context, const auto& request, auto* response) {
    ++forks;
    EXPECT_EQ(request.length(), 64u);
    return fork(context, request, response);
  };
  auto create = server_.on_create;
  server_.on_create = [&](auto* context, const auto& request, auto* response) {
    ++creates;
    return create(context, request, response);
  };
  const LoadResult result = RunUntil([&] { return decodes >= 20 && prefills >= 20; });
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  EXPECT_GT(result.series.at("decode").samples.size(), 0u);
  EXPECT_GT(result.series.at("prefill").samples.size(), 0u);
  EXPECT_EQ(forks, 3);
  EXPECT_EQ(creates, 1);
}

TEST_F(BenchTest, InlineTakesTurns) {
  options_.resident.compare_inline = true;
  std::atomic<int> decodes{0}, inlines{0};
  CountKinds(&decodes, &inlines);
  const LoadResult result = RunUntil([&] { return decodes >= 5 && inlines >= 5; });
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  const Series& decode = result.series.at("decode");
  const Series& with_inline = result.series.at("inline");
  ASSERT_GT(decode.samples.size(), 0u);
  ASSERT_GT(with_inline.samples.size(), 0u);
  EXPECT_GT(with_inline.request_bytes / with_inline.samples.size(),
            10 * decode.request_bytes / decode.samples.size());
}

TEST(LoadTest, ThePhasesAreThoseOfTheContract) {
  std::set<std::string> fields, phases;
  for (int i = 0; i < v1::Timing::descriptor()->field_count(); ++i) {
    fields.insert(v1::Timing::descriptor()->field(i)->name());
  }
  for (const char* phase : kPhases) phases.insert(absl::StrCat(phase, "_ns"));
  EXPECT_EQ(phases, fields);
  EXPECT_STREQ(kPhases[kKernelPhase], "kernel");
}

TEST_F(BenchTest, AnInlineStepThatDoesNotFitIsAnErrorWithItsSize) {
  options_.resident.compare_inline = true;
  options_.client.max_message_bytes = 8000;
  const LoadResult result = Run();
  EXPECT_GT(result.errors.at("RESOURCE_EXHAUSTED"), 0u);
  EXPECT_THAT(result.first_error, HasSubstr("at most 8000 bytes (max_message_bytes of the client"));
}

TEST_F(BenchTest, GoesOnAfterErrors) {
  FailSometimes([this](int call) -> grpc::Status {
    if (call == 10) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full"};
    if (call == 20) sequences_.Clear();  // the prefix too
    if (call == 30) return {grpc::StatusCode::DEADLINE_EXCEEDED, "late"};
    return grpc::Status::OK;
  });
  options_.concurrency = 1;
  options_.resident.fork_from_prefix = 20;
  const LoadResult result = RunCalls(100);
  const std::map<std::string, uint64_t> want = {
      {"RESOURCE_EXHAUSTED", 1}, {"NOT_FOUND", 1}, {"DEADLINE_EXCEEDED", 1}};
  EXPECT_EQ(result.errors, want);
  EXPECT_EQ(result.wrong_replies, 0u);
  EXPECT_GT(result.Ok(), 90u);
}

TEST_F(BenchTest, GoesOnAfterAStepWhoseAnswerWasLost) {
  options_.concurrency = 1;
  auto right = server_.on_attend;
  server_.on_attend = [&](auto* context, const auto& request, auto* response) {
    const grpc::Status status = right(context, request, response);  // takes effect
    return calls_++ == 5 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost") : status;
  };
  const LoadResult result = RunCalls(50);
  const std::map<std::string, uint64_t> want = {{"UNAVAILABLE", 1}};
  EXPECT_EQ(result.errors, want);
  EXPECT_GT(result.Ok(), 40u);
}

TEST_F(BenchTest, NoticesWrongAnswers) {
  options_.concurrency = 1;
  auto right = server_.on_attend;
  server_.on_attend = [&](auto* context, const auto& request, auto* response) {
    const grpc::Status status = right(context, request, response);
    response->set_sequence_lengths(0, 1);
    return status;
  };
  EXPECT_GT(RunCalls(3).errors["INTERNAL"], 0u) << "the client checks lengths";
  // Attends to the right K/V with the wrong query.
  server_.on_attend = [&](auto* context, const auto& request, auto* response) {
    v1::AttendRequest other = request;
    other.mutable_query()->assign(request.query().size(), '\0');
    return right(context, other, response);
  };
  EXPECT_GT(RunCalls(3).wrong_replies, 0u);
  // Right at first, then not the same for the same step.
  server_.on_attend = [&](auto* context, const auto& request, auto* response) {
    const grpc::Status status = right(context, request, response);
    if (calls_++ == kDecodeGrowth) response->mutable_output()->front() ^= 1;
    return status;
  };
  EXPECT_EQ(RunCalls(kDecodeGrowth + 10).wrong_replies, 1u);
}

TEST_F(BenchTest, OpenLoop) {
  options_.rate = 200;
  EXPECT_EQ(RunCalls(20).Failed(), 0u);
  options_.rate = 1e6;
  options_.duration = absl::Milliseconds(50);
  const LoadResult overloaded = Run();
  EXPECT_EQ(overloaded.Failed(), 0u);
  EXPECT_EQ(overloaded.Ok() + overloaded.not_sent, 50'000u);
}

TEST_F(BenchTest, StreamsAndConnections) {
  options_.stream = true;
  options_.connections = 2;
  options_.resident.fork_from_prefix = 70;  // all of the context
  const LoadResult result = Run();
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  EXPECT_GT(result.Ok(), 0u);
  EXPECT_EQ(server_.attend_calls(), 0);
}

TEST_F(BenchTest, StreamBesideUnaryCalls) {
  options_.stream = true;
  options_.compare_unary = true;
  const LoadResult result = RunCalls(5);
  EXPECT_EQ(result.Failed(), 0u) << result.first_error;
  EXPECT_EQ(result.series.size(), 2u);
  EXPECT_GT(result.series.at("decode").samples.size(), 0u);
  EXPECT_EQ(result.series.at("unary").samples.size(), static_cast<size_t>(server_.attend_calls()));
  const int calls = server_.attend_calls(), streamed = sequences_.streamed();
  const auto both = [&] {
    return server_.attend_calls() >= calls + 2 && sequences_.streamed() >= streamed + 2;
  };
  const std::vector<std::string> args = {"bench", "--mode=decode", "--shape=2x4/2x40x8", "--stream",
                                         "--compare_unary"};
  EXPECT_THAT(MainUntil(both, args, kExitOk), HasSubstr("stream_to_unary_p50_ratio = "));
}

TEST_F(BenchTest, TransportChoosesAmongTheTargets) {
  const std::string unix_target = "unix:" + testing::TempDir() + "/nobody_listens";
  const std::string targets = "--target=" + unix_target + "," + server_.target();
  const std::vector<std::string> args = {"bench", "--mode=decode", "--shape=1x4/2x40x8"};
  const auto with = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> all = args;
    all.insert(all.end(), flags.begin(), flags.end());
    return all;
  };
  EXPECT_THAT(MainUntil([&] { return server_.attend_calls() >= 2; }, with({"--transport=tcp"}),
                        targets, kExitOk),
              HasSubstr("target " + server_.target() + ", transport tcp"));
  EXPECT_THAT(Main(with({"--timeout=200ms", "--transport=unix"}), targets, kExitFailure),
              HasSubstr("connect to " + unix_target));
  EXPECT_THAT(Main(with({"--timeout=200ms"}), targets, kExitFailure),
              HasSubstr("connect to " + unix_target))
      << "the first";
  EXPECT_THAT(
      Main({"bench", "--transport=unix"}, kExitUsage),
      HasSubstr("--transport=unix: the target " + server_.target() + " has no such address"));
  const std::string local = "--target=local:/tmp/nobody_listens";
  EXPECT_THAT(Main({"bench", "--compare_grpc"}, local, kExitUsage),
              HasSubstr("--compare_grpc needs a local address and another one"));
  EXPECT_THAT(Main({"info", "--token_file=/x"}, local, kExitUsage), HasSubstr("user id"));
}

TEST_F(BenchTest, CommandReportsBothWays) {
  std::atomic<int> decodes{0}, inlines{0};
  CountKinds(&decodes, &inlines);
  const auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(),
                 {"bench", "--mode=decode", "--shape=2x4/2x40x8", "--compare_inline"});
    decodes = inlines = 0;
    return MainUntil([&] { return decodes >= 2 && inlines >= 2; }, flags, kExitOk);
  };
  EXPECT_THAT(run({}), HasSubstr("inline_to_decode_p50_ratio = "));
  const auto report = nlohmann::json::parse(run({"--json"}));
  EXPECT_EQ(report.at("mode"), "decode");
  EXPECT_EQ(report.at("sequences"), 2);
  EXPECT_EQ(report.at("context"), 40);
  EXPECT_GT(report.at("inline").at("latency_us").at("p50"), 0);
  EXPECT_GT(report.at("inline_to_decode_p50_ratio"), 0);
  EXPECT_EQ(report.at("server_phase_us").size(), kPhases.size());
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(BenchTest, FlagsThatMakeNoSenseAreUsageErrors) {
  const std::vector<std::vector<std::string>> bad = {
      {"--sequences=4"},
      {"--context=4"},
      {"--fork_from_prefix=4"},
      {"--pin"},
      {"--compare_inline"},
      {"--mode=decode", "--concurrency=4", "--sequences=3"},
      {"--mode=decode", "--context=4", "--fork_from_prefix=5"},
      {"--mode=decode", "--query_rows=2"},
      {"--mode=decode", "--compare_inline", "--rate=5"},
      {"--compare_unary"},
      {"--compare_unary", "--stream", "--concurrency=2", "--mode=mixed"},
      {"--compare_unary", "--stream", "--rate=5"},
      {"--compare_grpc"},
      {"--transport=pigeon"},
      {"--mode=prefill", "--context=4", "--fork_from_prefix=4"},
      {"--mode=prefill", "--compare_inline"},
      {"--mode=mixed"},
      {"--rounds_from_stdin"},
      {"--mode=prefill", "--context=99999999", "--query_rows=9999999"},
      {"--mode=decode", "--concurrency=2147483647"},
      {"--mode=decode", "--precision=int8_qk"},
      {"--mode=decode", "--kv_dtype=int8", "--precision=int8"},
      {"--mode=nonsense"}};
  for (std::vector<std::string> args : bad) {
    const std::string what = args.back();
    args.insert(args.begin(), "bench");
    EXPECT_THAT(Main(args, kExitUsage), HasSubstr("flashcore: --")) << what;
  }
}

TEST_F(BenchTest, SequencesAreListedAndDeleted) {
  const auto client = *Client::Create(server_.target());
  SequenceOptions options;
  options.num_layers = 2;
  options.num_kv_heads = 2;
  options.head_dim = 8;
  const Sequence first = client->CreateSequence(options).value();
  const Sequence second = client->CreateSequence(options).value();
  const Sequence third = client->CreateSequence(options).value();
  const std::vector<std::byte> rows(5 * first.RowBytes());
  ASSERT_TRUE(first.Append(1, rows, rows, Layout::kNHD).ok());
  const std::string hex = absl::BytesToHexString(first.id());
  const std::string table = Main({"sequences", "--client_name=me"}, kExitOk);
  EXPECT_EQ(server_.metadata("flashcore-client").back(), "me");
  EXPECT_THAT(table, HasSubstr(hex));
  EXPECT_THAT(table, HasSubstr(" 0..5 "));
  EXPECT_THAT(Main({"sequences", "--json"}, kExitOk),
              HasSubstr(absl::StrCat("{\"id\":\"", hex,
                                     "\",\"num_kv_heads\":2,\"head_dim\":8,\"dtype\":\"float16\","
                                     "\"kv_dtype\":\"same_as_query\",\"layer_lengths\":[0,5]")));
  EXPECT_THAT(Main({"sequences", "--delete=" + hex}, kExitOk), HasSubstr("deleted 1 of 1"));
  const std::string mixed = Main(
      {"sequences", "--delete", hex + "," + absl::BytesToHexString(second.id())}, kExitFailure);
  EXPECT_THAT(mixed, HasSubstr("deleted 1 of 2"));
  EXPECT_THAT(mixed, HasSubstr("NOT_FOUND"));
  EXPECT_EQ(sequences_.size(), 1u);
  EXPECT_THAT(Main({"sequences", "--delete=all", "--yes", "--json"}, kExitOk),
              HasSubstr("{\"deleted\":1}"));
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(BenchTest, InfoShowsTheLimitsOfSequences) {
  v1::DeviceInfo* device = server_.info.add_devices();
  device->set_kv_memory_bytes(uint64_t{8} << 30);
  device->set_kv_used_bytes(uint64_t{3} << 20);
  device->set_kv_hot_bytes(uint64_t{32} << 20);
  v1::Limits* limits = server_.info.mutable_limits();
  limits->set_max_layers(128);
  limits->set_client_sequences(1000);
  limits->set_sequence_idle_timeout_seconds(600);
  const std::string text = Main({"info"}, kExitOk);
  EXPECT_THAT(text, HasSubstr("K/V memory 8.0 GiB, 3.0 MiB used, 32.0 MiB for pinned sequences"));
  EXPECT_THAT(text, HasSubstr("128 layers"));
  EXPECT_THAT(
      text,
      HasSubstr("K/V unlimited, sequences 1000, metadata unlimited; idle ones expire after 600 s"));
}

TEST(LoadTest, SharesAndPrefillers) {
  for (const int workers : {1, 3, 4, 7}) {
    int sum = 0;
    for (int i = 0; i < workers; ++i) sum += ShareOf(10, i, workers);
    EXPECT_EQ(sum, 10) << workers;
  }
  EXPECT_EQ(ShareOf(10, 0, 4), 3);
  EXPECT_EQ(ShareOf(10, 3, 4), 2);
  const auto prefillers = [](int workers) {
    int count = 0;
    for (int i = 0; i < workers; ++i) count += Prefills(BenchMode::kMixed, i, workers);
    return count;
  };
  EXPECT_EQ(prefillers(2), 1);
  EXPECT_EQ(prefillers(4), 1);
  EXPECT_EQ(prefillers(7), 1);
  EXPECT_EQ(prefillers(8), 2);
  EXPECT_TRUE(Prefills(BenchMode::kPrefill, 0, 1));
  EXPECT_FALSE(Prefills(BenchMode::kDecode, 3, 4));
}

TEST(RowSourceTest, RowsAreTheSameHoweverTheyAreMade) {
  constexpr uint32_t kHeads = 3, kDim = 10;
  const RowSource source{DType::kFloat16, kDim, /*seed=*/7, /*prefix_rows=*/4};
  const auto fill = [&](const RowSource& from, uint64_t first, uint64_t rows, Layout layout) {
    std::vector<uint16_t> out(rows * kHeads * kDim);
    from.Fill(Tensor::kKey, first, rows, 0, kHeads, layout, absl::MakeSpan(out));
    return out;
  };
  const std::vector<uint16_t> all = fill(source, 0, 8, Layout::kNHD);
  const std::vector<uint16_t> tail = fill(source, 3, 5, Layout::kNHD);
  EXPECT_TRUE(std::equal(tail.begin(), tail.end(), all.begin() + 3 * kHeads * kDim));
  const std::vector<uint16_t> hnd = fill(source, 0, 8, Layout::kHND);
  std::vector<uint16_t> head(8 * kDim);
  source.Fill(Tensor::kKey, 0, 8, 2, 1, Layout::kNHD, absl::MakeSpan(head));
  EXPECT_TRUE(std::equal(head.begin(), head.end(), hnd.begin() + 2 * 8 * kDim));
  EXPECT_EQ(all[(5 * kHeads + 2) * kDim + 9], hnd[(2 * 8 + 5) * kDim + 9]);

  const RowSource prefix{DType::kFloat16, kDim, /*seed=*/0};
  const std::vector<uint16_t> shared = fill(prefix, 0, 8, Layout::kNHD);
  const auto end = shared.begin() + 4 * kHeads * kDim;
  EXPECT_TRUE(std::equal(shared.begin(), end, all.begin()));
  EXPECT_FALSE(std::equal(end, shared.end(), all.begin() + 4 * kHeads * kDim));
  for (const uint16_t element : all) {
    const float magnitude = std::abs(kernels::Float16ToFloat(element));
    EXPECT_TRUE(magnitude >= 0.5f && magnitude < 1.0f);
  }
}

}  // namespace
}  // namespace flashcore::cli
