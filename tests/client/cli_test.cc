// Flags, percentiles, JSON and the oracle of the command line.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "client/cli/bench_report.h"
#include "client/cli/command.h"
#include "client/cli/load.h"
#include "client/cli/oracle.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/reference.h"
#include "nlohmann/json.hpp"
#include "tests/client/fake_server.h"
#include "tests/client/unused_port.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(FlagTest, BenchShape) {
  BenchShape shape;
  std::string error;
  ASSERT_TRUE(AbslParseFlag("4x32/8x1024x128", &shape, &error));
  EXPECT_EQ(shape.batch, 4u);
  EXPECT_EQ(shape.num_heads, 32u);
  EXPECT_EQ(shape.num_kv_heads, 8u);
  EXPECT_EQ(shape.rows, 1024u);
  EXPECT_EQ(shape.head_dim, 128u);
  EXPECT_EQ(AbslUnparseFlag(shape), "4x32/8x1024x128");
  ASSERT_TRUE(AbslParseFlag("1x8x512x64", &shape, &error));
  EXPECT_EQ(shape.num_kv_heads, 8u);
  EXPECT_EQ(AbslUnparseFlag(shape), "1x8x512x64");
  for (const char* bad : {"", "1x8x512", "1x8x512x64x1", "1x8x512xD", "0x8x512x64", "1x8/3x512x64",
                          "1x8/x512x64", "1x8/2/2x512x64", "-1x8x512x64", "1x8x 512x64",
                          "99999999999x8x512x64", "1x8x0x64", "1X8X512X64"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &shape, &error)) << bad;
    EXPECT_FALSE(error.empty());
  }
}

TEST(FlagTest, Mask) {
  Mask mask;
  std::string error;
  for (const char* good :
       {"none", "causal", "window:127,0", "window:,8", "window:3,", "window:,"}) {
    ASSERT_TRUE(AbslParseFlag(good, &mask, &error)) << good;
    EXPECT_EQ(AbslUnparseFlag(mask), good);
  }
  for (const char* bad : {"", "Causal", "window", "window:", "window:1", "window:-1,0",
                          "window:1,2,3", "window:1e99,0"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &mask, &error)) << bad;
  }
  ASSERT_TRUE(AbslParseFlag("window:99999999999,0", &mask, &error)) << "longer than any K/V";
  EXPECT_EQ(AbslUnparseFlag(mask), "window:,0");
  ASSERT_TRUE(AbslParseFlag("window:2147483648,2147483647", &mask, &error));
  EXPECT_EQ(AbslUnparseFlag(mask), "window:,2147483647");
}

TEST(FlagTest, BenchMode) {
  std::string error;
  for (const char* good : {"attend", "decode", "prefill", "mixed"}) {
    BenchMode mode;
    ASSERT_TRUE(AbslParseFlag(good, &mode, &error)) << good;
    EXPECT_EQ(AbslUnparseFlag(mode), good);
  }
  BenchMode mode;
  for (const char* bad : {"", "Decode", "decod", "all"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &mode, &error)) << bad;
  }
}

TEST(FlagTest, SequenceIds) {
  const std::string a = "000102030405060708090a0b0c0d0e0f", b = "ffffffffffffffffffffffffffffffff";
  SequenceIds ids;
  std::string error;
  ASSERT_TRUE(AbslParseFlag(a + "," + b, &ids, &error));
  EXPECT_FALSE(ids.all);
  ASSERT_EQ(ids.ids.size(), 2u);
  EXPECT_EQ(ids.ids[0].size(), 16u);
  EXPECT_EQ(ids.ids[0][15], '\x0f');
  EXPECT_EQ(AbslUnparseFlag(ids), a + "," + b);
  ASSERT_TRUE(AbslParseFlag("all", &ids, &error));
  EXPECT_TRUE(ids.all);
  EXPECT_TRUE(ids.ids.empty());
  EXPECT_EQ(AbslUnparseFlag(ids), "all");
  ASSERT_TRUE(AbslParseFlag("", &ids, &error));
  EXPECT_FALSE(ids.all);
  for (const std::string& bad : {std::string("All"), a + ",", a + a, a.substr(1), "g" + a.substr(1),
                                 a + " ," + b, a + ",all"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &ids, &error)) << bad;
  }
}

TEST(FlagTest, CommandLine) {
  absl::FlagSaver saver;
  bool help = false;
  const auto parse = [&](std::vector<std::string> args) {
    return ParseFlags(BenchCommand(), args, &help);
  };
  EXPECT_EQ(parse({"--json", "--dtype=bf16", "--layout", "HND", "--nojson"}), absl::OkStatus());
  EXPECT_FALSE(absl::GetFlag(FLAGS_json));
  EXPECT_EQ(absl::GetFlag(FLAGS_dtype), DType::kBFloat16);
  EXPECT_EQ(absl::GetFlag(FLAGS_layout), Layout::kHND);
  EXPECT_EQ(parse({"--help", "--bogus"}), absl::OkStatus());
  EXPECT_TRUE(help);
  EXPECT_THAT(parse({"--bogus=1"}).message(), HasSubstr("unknown flag --bogus"));
  EXPECT_THAT(parse({"--query=x"}).message(), HasSubstr("unknown flag"));  // attend's
  EXPECT_THAT(parse({"--noshape"}).message(), HasSubstr("unknown flag"));
  EXPECT_THAT(parse({"--shape"}).message(), HasSubstr("no value"));
  EXPECT_THAT(parse({"--duration=fast"}).message(),
              HasSubstr("--duration=fast: not a time, such as 500ms, 2s or 5m"));
  EXPECT_THAT(parse({"--context=-1"}).message(), HasSubstr("not a whole number, not negative"));
  EXPECT_THAT(parse({"--pin=maybe"}).message(), HasSubstr("not true or false"));
  EXPECT_THAT(parse({"--dtype=int4"}).message(), HasSubstr("want float16 or bfloat16"));
  EXPECT_THAT(parse({"stray"}).message(), HasSubstr("stray"));
  EXPECT_EQ(Main({}), kExitUsage);
  EXPECT_EQ(Main({"nonsense"}), kExitUsage);
  EXPECT_EQ(Main({"info", "--bogus"}), kExitUsage);
  EXPECT_EQ(Main({"info", "--target=nonsense"}), kExitUsage);
  EXPECT_EQ(Main({"attend"}), kExitUsage);
  EXPECT_EQ(Main({"bench", "--help"}), kExitOk);
}

// stderr of a command that fails.
std::string ErrorOf(const std::vector<std::string>& args) {
  ::testing::internal::CaptureStderr();
  EXPECT_NE(Main(args), kExitOk);
  return ::testing::internal::GetCapturedStderr();
}

TEST(CliTest, AnErrorNamesTheVariableThatTheTargetCameFrom) {
  absl::FlagSaver saver;
  const UnusedPort nobody;
  const std::string target = nobody.target();
  const std::string words = absl::StrCat("(target ", target, ", of $FLASHCORE_TARGET)");
  setenv("FLASHCORE_TARGET", target.c_str(), 1);
  EXPECT_THAT(ErrorOf({"info", "--timeout=100ms"}), HasSubstr(words));
  EXPECT_THAT(ErrorOf({"bench", "--transport=local"}), HasSubstr(words));
  setenv("FLASHCORE_TARGET", "nonsense", 1);
  EXPECT_THAT(ErrorOf({"info"}), HasSubstr("(target nonsense, of $FLASHCORE_TARGET)"));
  EXPECT_THAT(ErrorOf({"info", "--target=" + target}), Not(HasSubstr("FLASHCORE_TARGET")));
  unsetenv("FLASHCORE_TARGET");
}

TEST(CliTest, ExitCodesAgainstAServer) {
  absl::FlagSaver saver;
  FakeServer server;
  const std::string target = "--target=" + server.target();
  EXPECT_EQ(Main({"info", target}), kExitOk);
  EXPECT_EQ(Main({"health", target}), kExitOk);
  EXPECT_EQ(Main({"verify", target}), kExitFailure);  // it names no head_dim
  // The fake answers at once, with its query: as a kernel that skips its work would.
  EXPECT_EQ(Main({"bench", target, "--shape=1x2x16x32", "--duration=50ms", "--warmup=0"}),
            kExitFailure);
  const UnusedPort nobody;
  EXPECT_EQ(Main({"info", "--target=" + nobody.target()}), kExitFailure);
  EXPECT_EQ(Main({"health", "--target=" + nobody.target()}), kExitFailure);
}

TEST(BenchReportTest, PercentilesAreOfNearestRank) {
  std::vector<float> samples;
  for (int i = 1000; i >= 1; --i) samples.push_back(static_cast<float>(i));
  const nlohmann::ordered_json p = Percentiles(samples);
  EXPECT_EQ(p.at("p50"), 500);
  EXPECT_EQ(p.at("p90"), 900);
  EXPECT_EQ(p.at("p99"), 990);
  EXPECT_EQ(p.at("p999"), 999);
  EXPECT_EQ(p.at("max"), 1000);
  EXPECT_EQ(p.at("mean"), 500.5);
  EXPECT_EQ(
      Percentiles({738.5050048828125f}).dump(),
      R"({"p50":738.505,"p90":738.505,"p99":738.505,"p999":738.505,"max":738.505,"mean":738.505})");
  EXPECT_EQ(NearestRank({7}, 0.5), 7);
  EXPECT_EQ(NearestRank({7}, 0.999), 7);
  EXPECT_EQ(NearestRank({1, 2, 3}, 0.5), 2);
  EXPECT_EQ(NearestRank({1, 2}, 0.5), 1);
  EXPECT_TRUE(std::isnan(NearestRank({}, 0.5)));
}

TEST(JsonTest, EscapesAndNests) {
  nlohmann::ordered_json json;
  json["a"] = "q\"\\\n\xff";
  json["b"] = 1.5;
  json["nan"] = std::nan("");
  json["t"] = true;
  json["list"] = {{{"n", 1}}, nlohmann::ordered_json::object()};
  absl::FlagSaver saver;
  testing::internal::CaptureStdout();
  Print(json, "text\n");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "text\n");
  absl::SetFlag(&FLAGS_json, true);
  testing::internal::CaptureStdout();
  Print(json, "text\n");
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            R"({"a":"q\"\\\n�","b":1.5,"nan":null,"t":true,"list":[{"n":1},{}]})"
            "\n");
}

TEST(LoadTest, FlopCountsWhatTheMaskShows) {
  AttendRequest shape;
  shape.num_heads = 2;
  shape.head_dim = 8;
  EXPECT_EQ(AttentionFlop(shape, 4, 4), 4.0 * 16 * 2 * 8);
  shape.mask = Mask::Causal();
  EXPECT_EQ(AttentionFlop(shape, 4, 4), 4.0 * 10 * 2 * 8);
  EXPECT_EQ(AttentionFlop(shape, 4, 2), 4.0 * 3 * 2 * 8);  // the first two rows see nothing
  EXPECT_EQ(AttentionFlop(shape, 2, 6), 4.0 * 11 * 2 * 8);
}

// Writes what unfused attention answers to the outputs of `batch`.
void AnswerUnfused(const KernelBatch& batch) {
  const kernels::ReferenceResult result = kernels::UnfusedAttention(batch.view());
  size_t element = 0, lse = 0;
  for (const kernels::Span& span : batch.spans) {
    for (int32_t row = 0; row < span.query_rows; ++row) {
      for (int32_t head = 0; head < batch.geometry.num_heads; ++head) {
        for (int32_t d = 0; d < batch.geometry.head_dim; ++d) {
          const uint16_t bits = kernels::FromFloat(batch.geometry.dtype,
                                                   static_cast<float>(result.output[element++]));
          std::memcpy(span.output + row * span.row_stride + head * span.head_stride + d * 2, &bits,
                      2);
        }
        span.lse[row * span.lse_row_stride + head * span.lse_head_stride] =
            static_cast<float>(result.lse[lse++]);
      }
    }
  }
}

// Answers `problem` as unfused attention would.
void AnswerUnfused(RandomRequest* problem) { AnswerUnfused(ToKernelBatch(problem->request())); }

TEST(OracleTest, AcceptsUnfusedAttentionAndNoticesErrors) {
  std::mt19937_64 random(1);
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
    for (const Mask& mask : {Mask::None(), Mask::Causal(), Mask::SlidingWindow(3, 1)}) {
      AttendRequest shape;
      shape.spans = {{5, 9}, {3, 0}, {7, 4}};
      shape.num_heads = 4;
      shape.num_kv_heads = 2;
      shape.head_dim = 32;
      shape.layout = layout;
      shape.mask = mask;
      RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2)) << "NaN must not pass";
      AnswerUnfused(&problem);
      EXPECT_TRUE(Compare(ToKernelBatch(problem.request())).Within(1.01));
      EXPECT_TRUE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      EXPECT_TRUE(Compare(SpotCheckBatch(ToKernelBatch(problem.request()), 7)).Within(1.01));
      uint16_t& element = problem.output()[40];
      const uint16_t right = element;
      element = kNanBits;
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      element = kernels::FloatToFloat16(3);
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
      EXPECT_FALSE(Compare(SpotCheckBatch(ToKernelBatch(problem.request()), 7)).Within(4));
      element = right;
      problem.request().lse.back() += 0.5f;
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).WithinBound(2e-2, 3e-2));
      EXPECT_FALSE(Compare(ToKernelBatch(problem.request())).Within(2));
    }
  }
}

TEST(OracleTest, Compares8BitSequencesWithTheirStoredRows) {
  std::mt19937_64 random(5);
  AttendRequest shape;
  shape.spans = {{3, 200}, {1, 65}};
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
    shape.layout = layout;
    RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
    AnswerUnfused(&problem);
    const KernelBatch plain = ToKernelBatch(problem.request());
    EXPECT_TRUE(Compare(AsStored(plain, KvDType::kSameAsQuery)).server == Compare(plain).server);
    for (const KvDType kv_dtype : {KvDType::kInt8, KvDType::kFloat8E4M3}) {
      AnswerUnfused(&problem);
      EXPECT_FALSE(Compare(AsStored(plain, kv_dtype)).Within(4)) << "it was not 8-bit";
      const KernelBatch stored = AsStored(plain, kv_dtype);
      AnswerUnfused(stored);
      EXPECT_TRUE(Compare(stored).Within(1.01));
      EXPECT_TRUE(SpotCheck(stored));
      EXPECT_FALSE(SpotCheck(plain));
    }
  }
}

// The error in an answer.
struct Fault {
  double query_scale = 1;  // factor of the scales of Q
  int lost_rows = 0;       // the last rows of K/V
};

// Answers a batch over INT8 K/V, without masks, with products of codes as its precision says.
void AnswerWithCodes(const KernelBatch& batch, const Fault& fault = {}) {
  const kernels::Geometry& g = batch.geometry;
  const auto dims = static_cast<size_t>(g.head_dim);
  for (const kernels::Span& span : batch.spans) {
    const int32_t rows = span.kv.rows - fault.lost_rows;
    const auto codes = [&](const std::byte* tensor, int32_t head, int32_t j) {
      return tensor + span.kv.pages[j / 64] * span.kv.page_stride + head * span.kv.head_stride +
             j % 64 * span.kv.row_stride;
    };
    for (int32_t i = 0; i < span.query_rows; ++i) {
      for (int32_t h = 0; h < g.num_heads; ++h) {
        const int32_t kv_head = h / g.group();
        std::vector<double> query(dims), weights(static_cast<size_t>(rows));
        double largest = 0, max = -1e300, sum = 0;
        for (size_t d = 0; d < dims; ++d) {
          uint16_t bits = 0;
          std::memcpy(&bits, span.query + i * span.row_stride + h * span.head_stride + d * 2, 2);
          query[d] = kernels::ToFloat(g.dtype, bits);
          largest = std::max(largest, std::abs(query[d]));
        }
        const double scale = largest / 127;
        for (double& q : query) q = std::rint(q / scale) * scale * fault.query_scale;
        for (int32_t j = 0; j < rows; ++j) {
          const std::byte* const k = codes(span.kv.key, kv_head, j);
          double dot = 0;
          for (size_t d = 0; d < dims; ++d) dot += query[d] * std::to_integer<int8_t>(k[d]);
          const double score = dot * kernels::RowScale(span.kv, span.kv.key, kv_head, j);
          weights[static_cast<size_t>(j)] = span.terms.Score(score);
          max = std::max(max, weights[static_cast<size_t>(j)]);
        }
        for (int32_t j = 0; j < rows; ++j) {
          double& weight = weights[static_cast<size_t>(j)];
          sum += weight = std::exp(weight - max);
          weight *= kernels::RowScale(span.kv, span.kv.value, kv_head, j);
        }
        for (size_t tile = 0; tile < weights.size(); tile += 64) {
          if (g.precision != kernels::Precision::kInt8QkPv) break;
          const auto first = weights.begin() + static_cast<ptrdiff_t>(tile);
          const auto last = first + std::min<ptrdiff_t>(64, weights.end() - first);
          const double step = *std::max_element(first, last) / 255;
          for (auto weight = first; weight != last; ++weight) {
            *weight = std::rint(*weight / step) * step;
          }
        }
        for (size_t d = 0; d < dims; ++d) {
          double output = 0;
          for (int32_t j = 0; j < rows; ++j) {
            output += weights[static_cast<size_t>(j)] *
                      std::to_integer<int8_t>(codes(span.kv.value, kv_head, j)[d]);
          }
          const uint16_t bits = kernels::FromFloat(g.dtype, static_cast<float>(output / sum));
          std::memcpy(span.output + i * span.row_stride + h * span.head_stride + d * 2, &bits, 2);
        }
        span.lse[i * span.lse_row_stride + h * span.lse_head_stride] =
            static_cast<float>(max + std::log(sum));
      }
    }
  }
}

// Answers to a request with `spans`, right and wrong ones, in products of codes and in others.
void CheckProductsOfCodes(const std::vector<SpanShape>& spans, float softmax_scale,
                          Precision precision, std::mt19937_64* random) {
  AttendRequest shape;
  shape.spans = spans;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 64;
  shape.softmax_scale = softmax_scale;
  RandomRequest problem(shape, /*want_lse=*/true, 1, random);
  const KernelBatch plain = ToKernelBatch(problem.request());
  const KernelBatch accepts = AsStored(plain, KvDType::kInt8, precision);
  AnswerUnfused(accepts);
  EXPECT_TRUE(Compare(accepts).Within(2)) << "it may be more precise";
  AnswerWithCodes(accepts);
  EXPECT_TRUE(Compare(accepts).Within(2)) << Compare(accepts).RmsRatio();
  EXPECT_TRUE(SpotCheck(accepts));
  if (spans[0].kv_rows < 65 || softmax_scale != 0.125f) return;
  EXPECT_FALSE(Compare(AsStored(plain, KvDType::kInt8)).Within(2)) << "it accepts 16 bits";
  AnswerWithCodes(accepts, {/*query_scale=*/17.0 / 16});
  EXPECT_FALSE(Compare(accepts).Within(2));
  AnswerWithCodes(accepts, {/*query_scale=*/1, /*lost_rows=*/1});
  EXPECT_FALSE(Compare(accepts).Within(2));
}

TEST(OracleTest, AllowsForProductsOfCodesWhatTheyCostAndNoMore) {
  std::mt19937_64 random(6);
  const std::vector<SpanShape> requests[] = {{{1, 1}}, {{1, 2}}, {{3, 200}, {1, 65}}, {{1, 2000}}};
  for (const std::vector<SpanShape>& spans : requests) {
    for (const float softmax_scale : {0.0f, 0.125f, 0.5f}) {
      for (const Precision precision : {Precision::kInt8Qk, Precision::kInt8QkPv}) {
        SCOPED_TRACE(absl::StrCat(spans[0].kv_rows, " rows, scale ", softmax_scale, ", ",
                                  AbslUnparseFlag(precision)));
        CheckProductsOfCodes(spans, softmax_scale, precision, &random);
      }
    }
  }
}

TEST(OracleTest, OnlyInt8HasProductsOfCodes) {
  AttendRequest shape;
  shape.spans = {{1, 1}};
  shape.num_heads = shape.num_kv_heads = 1;
  shape.head_dim = 64;
  std::mt19937_64 random(1);
  RandomRequest problem(shape, /*want_lse=*/false, 1, &random);
  const KernelBatch plain = ToKernelBatch(problem.request());
  for (const KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3}) {
    EXPECT_EQ(AsStored(plain, kv_dtype, Precision::kInt8QkPv).geometry.precision,
              kernels::Precision::k16Bit);
  }
}

TEST(OracleTest, NoticesARowLostOfThousandsByTheRootMeanSquare) {
  std::mt19937_64 random(4);  // with most seeds the largest error shows it too
  AttendRequest shape;
  shape.spans = {{1, 16000}};
  shape.dtype = DType::kBFloat16;
  shape.num_heads = 4;
  shape.num_kv_heads = 1;
  shape.head_dim = 64;
  RandomRequest problem(shape, /*want_lse=*/true, 1, &random);
  const AttendRequest whole = problem.request();
  problem.request().spans[0].kv_rows -= 1;  // answers without the last row
  AnswerUnfused(&problem);
  const Errors errors = Compare(ToKernelBatch(whole));
  EXPECT_LT(errors.server, 2 * errors.unfused) << "the largest error alone does not show it";
  EXPECT_FALSE(errors.Within(2));
}

TEST(OracleTest, ErrorsOfUnfusedAttentionAreNoExcuseForAnything) {
  std::mt19937_64 random(1);
  AttendRequest shape;
  shape.spans = {{100, 300}};
  shape.dtype = DType::kBFloat16;
  shape.num_heads = shape.num_kv_heads = 2;
  shape.head_dim = 64;
  RandomRequest problem(shape, /*want_lse=*/false, 16, &random);
  std::fill(problem.output().begin(), problem.output().end(), uint16_t{0});
  const Errors errors = Compare(ToKernelBatch(problem.request()));
  EXPECT_GT(errors.unfused, 1) << "it rounds scores of hundreds to 8 bits";
  EXPECT_FALSE(errors.Within(1000));
}

}  // namespace
}  // namespace flashcore::cli
