// Tests of the error bounds that the kernels are tested with: each accepts exact results and
// results that are rounded as a kernel rounds, and rejects results of a faulty kernel.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/cpu/tiles.h"
#include "kernels/half.h"
#include "kernels/oracle/error_bound.h"
#include "kernels/oracle/reference.h"
#include "kernels/registry.h"
#include "kernels/sm80/tiles.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/families.h"
#include "tests/kernels/faults.h"
#include "tests/kernels/rounded_attention.h"

namespace flashcore::kernels {
namespace {

// A kernel whether or not this build has it.
struct Case {
  KernelSpec spec;
  PlanOptions plan;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << Name(c.spec.arch) << "_" << Name(c.spec.dtype) << "_d" << c.spec.head_dim << "_"
       << Name(c.spec.accumulate);
  if (Is8Bit(c.spec.kv_dtype)) *out << "_kv_" << Name(c.spec.kv_dtype);
  if (c.spec.precision != Precision::k16Bit) *out << "_" << Name(c.spec.precision);
}

// Every way to round. Small head_dims have the fewest elements to see a fault in, large ones the
// largest errors.
std::vector<Case> Cases() {
  constexpr DType kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
  std::vector<Case> cases;
  for (int32_t head_dim : {32, 128}) {
    cases.push_back({{Arch::kCpu, kF16, head_dim}, CpuPlan()});
    cases.push_back({{Arch::kCpu, kBF16, head_dim}, CpuPlan()});
    cases.push_back({{Arch::kLargeShared, kF16, head_dim}, sm80::PlanFor(head_dim)});
    cases.push_back({{Arch::kLargeShared, kBF16, head_dim}, sm80::PlanFor(head_dim)});
    cases.push_back(
        {{Arch::kLargeShared, kF16, head_dim, Accumulate::kFloat16}, sm80::PlanFor(head_dim)});
  }
  for (int32_t head_dim : {64, 128}) {
    cases.push_back(
        {{Arch::kLargeShared, kF16, head_dim, Accumulate::kFloat32, KvDType::kFloat8E4M3},
         sm80::PlanFor(head_dim, Arch::kLargeShared, KvDType::kFloat8E4M3)});
  }
  const auto add_int8 = [&](DType dtype, int32_t head_dim, Precision precision) {
    cases.push_back(
        {{Arch::kLargeShared, dtype, head_dim, Accumulate::kFloat32, KvDType::kInt8, precision},
         sm80::PlanFor(head_dim, Arch::kLargeShared, KvDType::kInt8, precision)});
  };
  add_int8(kF16, 64, Precision::k16Bit);
  add_int8(kBF16, 64, Precision::kInt8Qk);
  add_int8(kF16, 64, Precision::kInt8QkPv);
  return cases;
}

class BoundsTest : public testing::TestWithParam<Case> {
 protected:
  BoundsTest() : random_(TestSeed()) {}

  Geometry MakeGeometry() const {
    const KernelSpec& spec = GetParam().spec;
    return {spec.dtype, 1, 1, spec.head_dim, spec.kv_dtype, spec.precision};
  }
  Rounding KernelRounding(const ProblemSpan& span) const {
    return RoundingOf(GetParam().spec, GetParam().plan, span.geometry(), span.span());
  }
  bool Fits(const Family& family) const {
    return family.fits_float16_sums || GetParam().spec.accumulate == Accumulate::kFloat32;
  }

  // One row of 40,000 is seen in the LSE, unless sums in float16 hide it there. One V row is not:
  // it changes O by less than its rounding.
  bool SeenOver32768Rows(Fault fault) const {
    if (fault == Fault::kLostValue) return false;
    const bool one_row = fault == Fault::kLostRow || fault == Fault::kMaskEdge;
    return !one_row || GetParam().spec.accumulate == Accumulate::kFloat32;
  }

  // O in the dtype, as a kernel with exact arithmetic would store it.
  AttentionResult Stored(AttentionResult result) const {
    const DType dtype = GetParam().spec.dtype;
    for (double& o : result.output) o = ToFloat(dtype, FromFloat(dtype, static_cast<float>(o)));
    for (double& lse : result.lse) lse = static_cast<float>(lse);
    return result;
  }

  void ExpectAccepted(const AttentionResult& got, const Expected& expected) const {
    const ErrorRatios ratios = CompareResults(got, expected.exact, expected);
    EXPECT_LE(ratios.element, 1);
    EXPECT_LE(ratios.row, 1);
    EXPECT_LE(ratios.lse, 1);
  }

  // Makes Q its own codes, so that rounding Q to codes of 8 bits or more changes nothing.
  static void MakeQueryItsCodes(ProblemSpan* span) {
    const Geometry& g = span->geometry();
    for (int32_t i = 0; i < span->span().query_rows; ++i) {
      for (int32_t h = 0; h < g.num_heads; ++h) {
        uint16_t* const row = span->QueryRow(i, h);
        for (int32_t d = 0; d < g.head_dim; ++d) {
          const float code = d == 0 ? 127 : std::nearbyint(127 * ToFloat(g.dtype, row[d]));
          row[d] = FromFloat(g.dtype, code / 128);
        }
      }
    }
  }

  std::mt19937_64 random_;
};

TEST_P(BoundsTest, AcceptWhatAKernelRounds) {
  for (const Family& family : AllFamilies()) {
    if (!Fits(family)) continue;
    FamilyProblem problem(family, MakeGeometry(), &random_);
    for (int s = 0; s < problem->num_spans(); ++s) {
      SCOPED_TRACE(family.name + ", span " + std::to_string(s));
      const Geometry& geometry = problem->geometry();
      const Span& span = problem->span(s).span();
      const Expected expected = ExpectedOf(geometry, span, KernelRounding(problem->span(s)));
      ExpectAccepted(Stored(expected.exact), expected);
      ExpectAccepted(RoundedAttention(GetParam().spec, GetParam().plan, geometry, span), expected);
    }
  }
}

TEST_P(BoundsTest, RejectFaultsInEveryFamily) {
  std::set<Fault> seen_anywhere;
  for (const Family& family : AllFamilies()) {
    if (!Fits(family)) continue;
    FamilyProblem problem(family, MakeGeometry(), &random_);
    std::set<Fault> seen;
    for (int s = 0; s < problem->num_spans(); ++s) {
      const Geometry& geometry = problem->geometry();
      const Span& span = problem->span(s).span();
      const Rounding rounding = KernelRounding(problem->span(s));
      const Expected expected = ExpectedOf(geometry, span, rounding);
      const FaultySpan faulty(geometry, span, rounding, expected.exact);
      for (int f = 0; f < static_cast<int>(Fault::kCount); ++f) {
        const auto fault = static_cast<Fault>(f);
        if (family.long_kv && !SeenOver32768Rows(fault)) continue;
        const std::optional<AttentionResult> wrong = faulty.With(fault, &random_);
        if (!wrong.has_value()) continue;
        seen.insert(fault);
        EXPECT_FALSE(CompareResults(Stored(*wrong), expected.exact, expected).Ok())
            << Name(fault) << ", " << family.name << ", span " << s << " (" << span.query_rows
            << " query rows, " << span.kv.rows << " K/V rows)";
      }
    }
    seen_anywhere.insert(seen.begin(), seen.end());
    for (Fault fault : {Fault::kZeros, Fault::kLostRow, Fault::kLostValue, Fault::kLostTile,
                        Fault::kSwappedHeads}) {
      if (family.long_kv && !SeenOver32768Rows(fault)) continue;
      EXPECT_EQ(seen.count(fault), 1u) << Name(fault) << ", " << family.name;
    }
    EXPECT_EQ(seen.count(Fault::kWrongKvHead), family.kv_heads > 1 ? 1u : 0u) << family.name;
  }
  const KernelSpec& spec = GetParam().spec;
  const size_t codes = spec.kv_dtype == KvDType::kInt8 ? 1 : 0;
  const size_t probability = spec.precision == Precision::kInt8QkPv ? 1 : 0;
  EXPECT_EQ(seen_anywhere.count(Fault::kQueryScale), codes);
  EXPECT_EQ(seen_anywhere.count(Fault::kQueryBits), codes);
  EXPECT_EQ(seen_anywhere.count(Fault::kProbability), probability);
}

// Where Q is its own codes, the bounds are around the reference.
TEST_P(BoundsTest, TheirOracleIsTheReference) {
  for (const char* name : {"EveryLengthWithEveryMaskAndLayout", "GroupedQueryHeads",
                           "RowsWithoutVisibleKv", "ScalesOfEitherSignAndZero"}) {
    for (const Family& family : FamiliesNamed(name)) {
      FamilyProblem problem(family, MakeGeometry(), &random_);
      for (int s = 0; s < problem->num_spans(); ++s) {
        ProblemSpan& span = problem->span(s);
        if (KernelRounding(span).query_codes > 0) MakeQueryItsCodes(&span);
      }
      const AttentionResult reference = ReferenceAttention(problem->batch());
      size_t element = 0, row = 0;
      for (int s = 0; s < problem->num_spans(); ++s) {
        const ProblemSpan& span = problem->span(s);
        const Expected expected = ExpectedOf(span.geometry(), span.span(), KernelRounding(span));
        for (double o : expected.exact.output) ASSERT_NEAR(o, reference.output[element++], 1e-12);
        for (double lse : expected.exact.lse) {
          const double want = reference.lse[row++];
          if (std::isinf(want)) {
            ASSERT_EQ(lse, want);
          } else {
            ASSERT_NEAR(lse, want, 1e-11);
          }
        }
      }
      EXPECT_EQ(element, reference.output.size());
      EXPECT_EQ(row, reference.lse.size());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BoundsTest, testing::ValuesIn(Cases()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace flashcore::kernels
