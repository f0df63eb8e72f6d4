// flashcore verify against fake servers: it accepts right answers, and notices each wrong one.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "client/bench/commands.h"
#include "client/bench/verify_case.h"
#include "client/cpp/encode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/base/test_seed.h"
#include "tests/client/fake_sequences.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// Cases of one run, by the number modulo 10; see RandomCase.
constexpr int kCases = 10;
constexpr int kShortResident = 3;
constexpr int kLongInline = 5, kForked = 6, kLongForked = 8, kLongResident = 10;
constexpr int kLongRows = 500;  // a span of a long case has more, one of a short case fewer

// The contents of a server. The longest spans of a small one have thousands of rows, and a run of
// its cases takes a fraction of the time; those of a large one have kMaxVerifyRows.
struct Size {
  uint64_t kv_memory_bytes, message_bytes;
  uint32_t heads;
};
constexpr Size kSmall = {uint64_t{8} << 20, uint64_t{4} << 20, 4};
constexpr Size kLarge = {uint64_t{1} << 30, uint64_t{64} << 20, 1024};

v1::GetServerInfoResponse Info(const std::string& accumulate, const Size& size) {
  v1::GetServerInfoResponse info;
  for (const v1::DType dtype : {v1::DTYPE_FLOAT16, v1::DTYPE_BFLOAT16}) {
    if (accumulate == "float16" && dtype == v1::DTYPE_BFLOAT16) continue;
    info.add_kernels()->set_dtype(dtype);
    info.mutable_kernels()->rbegin()->set_accumulate(accumulate);
  }
  for (const uint32_t head_dim : {32, 64}) info.mutable_limits()->add_head_dims(head_dim);
  info.mutable_limits()->set_max_message_bytes(size.message_bytes);
  info.mutable_limits()->set_max_spans(4096);
  info.mutable_limits()->set_max_heads(size.heads);
  info.add_devices()->set_kv_memory_bytes(size.kv_memory_bytes);
  return info;
}

using Attention = FakeSequences::Attention;
// Makes the attention of a span wrong, and returns true; or leaves it, and returns false.
using Fault = std::function<bool(Attention*)>;

class VerifyTest : public ::testing::TestWithParam<Size> {
 protected:
  VerifyTest() {
    server_ = std::make_unique<FakeServer>();
    server_->info = Info("float32", GetParam());
    sequences_.Install(server_.get());
  }
  ~VerifyTest() override { server_.reset(); }

  // Runs verify. Every case that `fault` touched must fail, and no other. The result is the numbers
  // of those cases.
  std::set<int> Verify(const Fault& fault) {
    std::set<int> wrong;
    const int before = server_->attend_calls();
    // verify has one request in flight, and sends one for each case.
    sequences_.fault = [&](Attention* attention) {
      if (fault(attention)) wrong.insert(server_->attend_calls() - before);
    };
    report_ = Run();
    sequences_.fault = nullptr;
    for (int number = 1; number <= kCases; ++number) {
      const nlohmann::json& result = report_.at("results").at(static_cast<size_t>(number) - 1);
      EXPECT_EQ(result.at("ok"), wrong.count(number) == 0)
          << number << " with --seed=" << seed_ << ": " << result;
    }
    EXPECT_EQ(report_.at("failed"), wrong.size());
    EXPECT_EQ(exit_code_, wrong.empty() ? kExitOk : kExitFailure);
    EXPECT_EQ(sequences_.size(), 0u);
    return wrong;
  }

  nlohmann::json Run() {
    absl::FlagSaver saver;
    ::testing::internal::CaptureStdout();
    exit_code_ =
        Main({VerifyCommand()}, {"verify", "--json", absl::StrCat("--target=", server_->target()),
                                 absl::StrCat("--cases=", kCases), absl::StrCat("--seed=", seed_)});
    return nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  }

  const uint32_t seed_ = TestSeed() | 1;  // never 0, which asks for a fresh one
  FakeSequences sequences_;
  std::unique_ptr<FakeServer> server_;
  nlohmann::json report_;  // of Verify
  int exit_code_ = 0;
};

size_t RowBytes(const Attention& a) {
  return static_cast<size_t>(a.geometry.num_kv_heads) * static_cast<size_t>(a.geometry.head_dim) *
         2;
}

int Rows(const Attention& a) { return static_cast<int>(a.key.size() / RowBytes(a)); }

// Removes `count` K/V rows from row `first` on.
void RemoveRows(int first, int count, Attention* a) {
  const size_t bytes = RowBytes(*a);
  for (std::string* tensor : {&a->key, &a->value}) {
    tensor->erase(static_cast<size_t>(first) * bytes, static_cast<size_t>(count) * bytes);
  }
}

// One row, or one of 10,000: in BF16, rounding of O hides a single row of 33,000.
int Few(const Attention& a) { return 1 + Rows(a) / 10'000; }

// Rows that every query row of a long case sees: its windows reach back 512 rows.
bool LoseFewRows(Attention* a) {
  if (Rows(*a) < kLongRows) return false;
  RemoveRows(Rows(*a) - 200, Few(*a), a);
  return true;
}

TEST_P(VerifyTest, AcceptsRightAnswers) {
  EXPECT_EQ(Verify([](Attention*) { return false; }), std::set<int>());
  EXPECT_EQ(server_->attend_calls(), kCases);
  // The report has the errors: the fake rounds O and nothing else.
  for (const int number : {kLongInline, kForked, kLongForked, kLongResident}) {
    const nlohmann::json& result = report_.at("results").at(static_cast<size_t>(number) - 1);
    EXPECT_GT(result.at("error"), 0) << result;
    EXPECT_GE(result.at("unfused_error"), result.at("error")) << result;
    EXPECT_LE(result.at("rms_ratio"), 1.001) << result;
  }
}

TEST_P(VerifyTest, NoticesFewLostRowsOfManyWhereverKvLies) {
  EXPECT_EQ(Verify(LoseFewRows), (std::set<int>{kLongInline, kForked, kLongForked, kLongResident}));
}

TEST_P(VerifyTest, NoticesLostRowsInOneSpanOfSeveral) {
  // The last of the forks alone; the others' errors do not excuse it.
  int spans = 0;
  EXPECT_THAT(Verify([&](Attention* a) {
                if (!a->resident || Rows(*a) < kLongRows || ++spans % 2 == 1) return false;
                return LoseFewRows(a);
              }),
              IsSupersetOf(std::set<int>{kForked, kLongForked}));
}

TEST_P(VerifyTest, NoticesALostAppend) {
  EXPECT_EQ(Verify([](Attention* a) {
              if (!a->resident || Rows(*a) < kLongRows) return false;
              RemoveRows(Rows(*a) - Few(*a), Few(*a), a);
              return true;
            }),
            (std::set<int>{kForked, kLongForked, kLongResident}));
}

TEST_P(VerifyTest, NoticesWrongRowsOfThePrefix) {
  // Values as of other positions.
  EXPECT_EQ(Verify([](Attention* a) {
              if (!a->resident || Rows(*a) < kLongRows) return false;
              const size_t bytes = static_cast<size_t>(Few(*a)) * RowBytes(*a);
              const size_t at = static_cast<size_t>(Rows(*a) - 200) * RowBytes(*a);
              a->value.replace(at, bytes, a->value.substr(at - bytes, bytes));
              return true;
            }),
            (std::set<int>{kForked, kLongForked, kLongResident}));
}

TEST_P(VerifyTest, NoticesAWrongEdgeOfTheMask) {
  // Every long case has a window, a little too narrow.
  EXPECT_EQ(Verify([](Attention* a) {
              if (Rows(*a) < kLongRows) return false;
              const int32_t left = std::min(a->span.terms.mask.left, Rows(*a) - a->span.query_rows);
              a->span.terms.mask.left = left - Few(*a);
              return true;
            }),
            (std::set<int>{kLongInline, kForked, kLongForked, kLongResident}));
}

TEST_P(VerifyTest, NoticesSwappedKvHeads) {
  const auto fault = [](Attention* a) {
    if (a->geometry.num_kv_heads < 2 || Rows(*a) == 0) return false;
    const auto head = static_cast<size_t>(a->geometry.head_dim) * 2;
    for (size_t row = 0; row < a->key.size(); row += RowBytes(*a)) {
      std::swap_ranges(&a->key[row], &a->key[row + head], &a->key[row + head]);
      std::swap_ranges(&a->value[row], &a->value[row + head], &a->value[row + head]);
    }
    return true;
  };
  EXPECT_FALSE(Verify(fault).empty());
}

TEST_P(VerifyTest, NoticesZerosEverywhere) {
  // Also where unfused attention has no digit right, as with large magnitudes.
  bool seen[kCases + 1] = {};
  const std::set<int> wrong = Verify([&](Attention* a) {
    if (Rows(*a) == 0) return false;
    a->value.assign(a->value.size(), '\0');
    return true;
  });
  for (const int number : wrong) seen[number] = true;
  for (const int number : {kLongInline, kForked, kLongForked, kLongResident}) {
    EXPECT_TRUE(seen[number]) << number;
  }
}

TEST_P(VerifyTest, AcceptsRightAnswersOfSumsInFloat16) {
  server_->info = Info("float16", GetParam());
  EXPECT_EQ(Verify([](Attention*) { return false; }), std::set<int>());
}

TEST_P(VerifyTest, NoticesWhatSumsInFloat16DoNotExplain) {
  server_->info = Info("float16", GetParam());
  EXPECT_EQ(Verify([](Attention* a) {
              if (Rows(*a) < kLongRows) return false;
              RemoveRows(Rows(*a) - 264, 64, a);
              return true;
            }),
            (std::set<int>{kLongInline, kForked, kLongForked, kLongResident}));
}

TEST_P(VerifyTest, NoticesWrongLengths) {
  const auto attend = server_->on_attend;
  server_->on_attend = [&](auto* context, const auto& request, auto* response) {
    const grpc::Status status = attend(context, request, response);
    if (response->sequence_lengths_size() > 0) {
      response->set_sequence_lengths(0, response->sequence_lengths(0) + 1);
    }
    return status;
  };
  const nlohmann::json report = Run();
  EXPECT_EQ(exit_code_, kExitFailure);
  EXPECT_EQ(report.at("failed"), 4);
  for (const int number : {kShortResident, kForked, kLongForked, kLongResident}) {
    EXPECT_THAT(report.at("results").at(static_cast<size_t>(number) - 1).at("status").dump(),
                HasSubstr("sequence_lengths[0]"));
  }
}

INSTANTIATE_TEST_SUITE_P(Small, VerifyTest, ::testing::Values(kSmall));
INSTANTIATE_TEST_SUITE_P(Stress, VerifyTest, ::testing::Values(kLarge));

TEST(VerifyCaseTest, PlacesAndLengthsAreWhatTheHeaderSays) {
  std::mt19937_64 random(TestSeed());
  const Abilities server(Info("float32", kLarge));
  for (int number = 1; number <= 200; ++number) {
    const Case c = RandomCase(server, number, &random);
    SCOPED_TRACE(Describe(c));
    const bool resident = c.place != KvPlace::kInline;
    EXPECT_EQ(c.appended_rows.size(), resident ? c.shape.spans.size() : 0);
    const int kind = (number - 1) % 10 + 1;
    EXPECT_EQ(resident, kind == kShortResident || kind == kForked || kind == kLongForked ||
                            kind == kLongResident);
    EXPECT_EQ(c.place == KvPlace::kForked, kind == kForked || kind == kLongForked);
    const bool is_long = kind == kLongInline || kind == kLongForked || kind == kLongResident;
    const uint32_t first = number <= kCases && is_long ? kMaxVerifyRows : 0;
    const uint32_t least = kind == kForked ? 512 : is_long ? 500 : 0;
    for (size_t i = 0; i < c.shape.spans.size(); ++i) {
      const SpanShape& span = c.shape.spans[i];
      EXPECT_GE(span.kv_rows, std::max(first, least));
      EXPECT_GE(span.kv_rows, c.prefix_rows + (resident ? c.appended_rows[i] : 0));
    }
    EXPECT_GE(c.shape.spans.size(), c.place == KvPlace::kForked ? 2u : 1u);
    EXPECT_GE(c.prefix_rows, c.place == KvPlace::kForked ? least : 0);
  }
}

TEST(VerifyCaseTest, OnlyHeadDimsThatTheServerStoresAsInt8AreAskedFor) {
  std::mt19937_64 random(TestSeed());
  v1::GetServerInfoResponse info = Info("float32", kLarge);
  v1::KernelInfo& kernel = *info.add_kernels();
  kernel.set_dtype(v1::DTYPE_FLOAT16);
  kernel.set_head_dim(64);
  kernel.set_accumulate("float32");
  kernel.set_kv_dtype(v1::KV_DTYPE_INT8);
  const Abilities server(info);
  int int8 = 0;
  int others = 0;  // with head_dim 32
  for (int number = 1; number <= 200; ++number) {
    const Case c = RandomCase(server, number, &random);
    if (c.kv_dtype == KvDType::kInt8) {
      ++int8;
      EXPECT_EQ(c.shape.head_dim, 64u) << Describe(c);
    } else if (c.place != KvPlace::kInline && c.shape.head_dim == 32) {
      ++others;
    }
  }
  EXPECT_GT(int8, 0);
  EXPECT_GT(others, 0);
}

TEST(VerifyCaseTest, OnlyPrecisionsThatTheServerHasKernelsForAreAskedFor) {
  std::mt19937_64 random(TestSeed());
  v1::GetServerInfoResponse info = Info("float32", kLarge);
  const auto add = [&](uint32_t head_dim, v1::KvDType kv_dtype, v1::Precision precision) {
    v1::KernelInfo& kernel = *info.add_kernels();
    kernel.set_dtype(v1::DTYPE_FLOAT16);
    kernel.set_head_dim(head_dim);
    kernel.set_kv_dtype(kv_dtype);
    kernel.set_precision(precision);
  };
  for (const uint32_t head_dim : {32, 64}) {
    add(head_dim, v1::KV_DTYPE_INT8, v1::PRECISION_16BIT);
    add(head_dim, v1::KV_DTYPE_FLOAT8_E4M3, v1::PRECISION_16BIT);
  }
  add(64, v1::KV_DTYPE_INT8, v1::PRECISION_INT8_QK_PV);
  const Abilities server(info);
  int cases[2] = {};  // over INT8 K/V of head_dim 64, by whether they accept 8-bit products
  for (int number = 1; number <= 400; ++number) {
    const Case c = RandomCase(server, number, &random);
    SCOPED_TRACE(Describe(c));
    const bool can = c.kv_dtype == KvDType::kInt8 && c.shape.head_dim == 64;
    const bool accepts = c.shape.precision == Precision::kInt8QkPv;
    EXPECT_TRUE(accepts ? can : c.shape.precision == Precision::k16Bit);
    if (can) ++cases[accepts];
    EXPECT_TRUE(!accepts || c.magnitude == 1);
    EXPECT_EQ(Describe(c).find("precision=int8_qk_pv") != std::string::npos, accepts);
  }
  EXPECT_GT(cases[false], 0);
  EXPECT_GT(cases[true], 0);
}

TEST(VerifyCaseTest, ASmallServerGetsWhatItCanHold) {
  std::mt19937_64 random(TestSeed());
  v1::GetServerInfoResponse info = Info("float32", kLarge);
  info.mutable_devices(0)->set_kv_memory_bytes(uint64_t{4} << 20);
  info.mutable_devices(0)->set_kv_used_bytes(uint64_t{2} << 20);
  const Abilities server(info);
  EXPECT_EQ(server.kv_bytes, uint64_t{1} << 19);
  for (int number = 1; number <= 100; ++number) {
    const Case c = RandomCase(server, number, &random);
    if (c.place == KvPlace::kInline || number % 10 == kShortResident) continue;
    EXPECT_LE(2 * c.shape.KvBytes(), server.kv_bytes) << Describe(c);
  }
}

}  // namespace
}  // namespace flashcore::cli
