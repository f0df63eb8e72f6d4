#include "kernels/bench/bench_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <vector>

namespace flashcore::kernels {
namespace {

using testing::HasSubstr;

BenchShape Parsed(const std::string& text) {
  BenchShape shape;
  EXPECT_EQ(ParseShape(text, &shape), "");
  return shape;
}

std::string ErrorOf(const std::string& text) {
  BenchShape shape;
  return ParseShape(text, &shape);
}

TEST(ParseShape, DimensionsAreInOrder) {
  const BenchShape shape = Parsed("2x32/8x4096x128");
  EXPECT_EQ(shape.name, "2x32/8x4096x128");
  EXPECT_EQ(shape.attention.spans, 2);
  EXPECT_EQ(shape.attention.num_heads, 32);
  EXPECT_EQ(shape.attention.num_kv_heads, 8);
  EXPECT_EQ(shape.attention.query_rows, 4096);
  EXPECT_EQ(shape.attention.kv_rows, 4096);
  EXPECT_EQ(shape.attention.head_dim, 128);
  EXPECT_TRUE(shape.attention.mask == Mask::None());
  EXPECT_FALSE(shape.attention.paged);
}

TEST(ParseShape, OptionsComeInAnyOrder) {
  const BenchShape shape = Parsed("1x8x512x64,paged,window=128:0,q=7");
  EXPECT_EQ(shape.attention.num_kv_heads, 8);
  EXPECT_EQ(shape.attention.query_rows, 7);
  EXPECT_EQ(shape.attention.kv_rows, 512);
  EXPECT_TRUE(shape.attention.mask == Mask::SlidingWindow(128, 0));
  EXPECT_TRUE(shape.attention.paged);
  EXPECT_TRUE(Parsed("1x8x512x64,causal").attention.mask == Mask::Causal());
}

TEST(ParseShape, EveryNameIsAShape) {
  for (const NamedShape& named : kNamedShapes) EXPECT_EQ(Parsed(named.name).name, named.name);
  const BenchShape decode = Parsed("decode16");
  EXPECT_EQ(decode.attention.spans, 16);
  EXPECT_EQ(decode.attention.query_rows, 1);
}

TEST(ParseShape, SaysWhereItStopped) {
  EXPECT_THAT(ErrorOf("1x8x512"), HasSubstr("from '' on"));
  EXPECT_THAT(ErrorOf("1x8x512x64,causel"), HasSubstr("from 'causel' on"));
  EXPECT_THAT(ErrorOf("1x8x512x64 "), HasSubstr("from ' ' on"));
  EXPECT_THAT(ErrorOf("1x0x512x64"), HasSubstr("from '0x512x64' on"));
  EXPECT_THAT(ErrorOf("1x8x99999999999x64"), HasSubstr("from '99999999999x64' on"));
  EXPECT_THAT(ErrorOf("1x8x512x64,window=-1:0"), HasSubstr("from '-1:0' on"));
  EXPECT_THAT(ErrorOf("missoin"), HasSubstr("'missoin' is no known name"));
}

TEST(ParseShape, KvHeadsDivideHeads) {
  EXPECT_THAT(ErrorOf("1x8/3x512x64"), HasSubstr("3 KV heads do not divide 8 heads"));
}

TEST(ParseShape, APrefixIsPagesThatAllSpansShare) {
  const BenchShape shape = Parsed("3x8x200x64,q=1,prefix=128");
  EXPECT_TRUE(shape.attention.paged);
  EXPECT_EQ(PageTable(shape.attention), (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7}));
  EXPECT_THAT(ErrorOf("1x8x200x64,prefix=100"), HasSubstr("a prefix of 100 rows is not"));
  EXPECT_THAT(ErrorOf("1x8x200x64,prefix=256"), HasSubstr("a prefix of 256 rows is not"));
}

TEST(BenchShapes, FlopsCountWhatTheMaskShows) {
  EXPECT_EQ(Flops(Parsed("1x1x4x32").attention), 4.0 * 32 * 16);
  EXPECT_EQ(Flops(Parsed("1x1x4x32,causal").attention), 4.0 * 32 * (1 + 2 + 3 + 4));
  EXPECT_EQ(Flops(Parsed("2x8/2x4x32,q=1").attention), 4.0 * 32 * 4 * 8 * 2);
  EXPECT_EQ(QueryBytes(Parsed("2x8/2x4x32,q=1").attention), 2 * 8 * 32 * 2);
  EXPECT_EQ(KvBytes(Parsed("2x8/2x4x32,q=1").attention), 2 * 2 * 2 * 4 * 32 * 2);
}

TEST(ParseBenchOptions, WithoutShapesTakesAllNamedOnes) {
  BenchOptions options;
  ASSERT_EQ(ParseBenchOptions({"--dtype=bfloat16", "--rounds=7"}, &options), "");
  EXPECT_EQ(options.shapes.size(), std::size(kNamedShapes));
  EXPECT_EQ(options.shapes.front().attention.dtype, DType::kBFloat16);
  EXPECT_EQ(options.shapes.front().attention.kv_dtype, KvDType::kSameAsQuery);
  EXPECT_EQ(options.rounds, 7);
}

TEST(ParseBenchOptions, ShapesRepeat) {
  BenchOptions options;
  ASSERT_EQ(ParseBenchOptions({"--shape=mission", "--shape=1x8x64x32", "--arch=sm80"}, &options),
            "");
  ASSERT_EQ(options.shapes.size(), 2u);
  EXPECT_EQ(options.shapes[1].attention.kv_rows, 64);
  EXPECT_EQ(options.arch, Arch::kSm80);
}

TEST(ParseBenchOptions, KvDTypeIsThatOfEveryShape) {
  BenchOptions options;
  ASSERT_EQ(ParseBenchOptions({"--kv_dtype=float8_e4m3", "--shape=1x8/2x64x64,q=1"}, &options), "");
  const AttentionShape& shape = options.shapes.front().attention;
  EXPECT_EQ(KvBytes(shape), 2 * 2 * 64 * 64);
  EXPECT_EQ(QueryBytes(shape), 8 * 64 * 2);
  const KernelSpec spec =
      SpecFor(options.shapes.front().attention, Arch::kSm80, Accumulate::kFloat32);
  EXPECT_EQ(KernelName(spec), "sm80_float16_d64_float32_kv_float8_e4m3");
}

TEST(ParseBenchOptions, NamesTheFlagThatIsWrong) {
  BenchOptions options;
  EXPECT_EQ(ParseBenchOptions({"--rounds=0"}, &options), "--rounds: '0' is not a positive integer");
  EXPECT_EQ(ParseBenchOptions({"--rounds=5s"}, &options),
            "--rounds: '5s' is not a positive integer");
  EXPECT_EQ(ParseBenchOptions({"--dtype=fp16"}, &options),
            "--dtype: 'fp16' is not one of float16, bfloat16");
  EXPECT_EQ(ParseBenchOptions({"--arch=sm90"}, &options),
            "--arch: 'sm90' is not one of sm80, sm89");
  EXPECT_EQ(ParseBenchOptions({"--json="}, &options), "--json: no file name");
  EXPECT_EQ(ParseBenchOptions({"--list=all"}, &options), "--list: no such flag");
  EXPECT_EQ(ParseBenchOptions({"mission"}, &options), "mission: no such flag");
}

TEST(ParseBenchOptions, L2IsColdAndWarmUnlessOneIsNamed) {
  BenchOptions options;
  ASSERT_EQ(ParseBenchOptions({}, &options), "");
  EXPECT_EQ(options.l2, (std::vector<L2State>{L2State::kCold, L2State::kWarm}));
  ASSERT_EQ(ParseBenchOptions({"--l2=warm"}, &options), "");
  EXPECT_EQ(options.l2, std::vector<L2State>{L2State::kWarm});
  EXPECT_EQ(ParseBenchOptions({"--l2=hot"}, &options),
            "--l2: 'hot' is not one of cold, warm, both");
}

TEST(SetsFor, ColdSetsExceedTheL2AndAWarmOneFits) {
  const AttentionShape mission = Parsed("mission").attention;
  ASSERT_EQ(SetBytes(mission), 2 << 20);
  EXPECT_EQ(SetsFor(mission, L2State::kCold, 60 << 20), 90);
  EXPECT_EQ(SetsFor(mission, L2State::kCold, (60 << 20) + 1), 91);
  EXPECT_EQ(SetsFor(mission, L2State::kCold, 1 << 10), 2);
  EXPECT_EQ(SetsFor(mission, L2State::kWarm, 4 << 20), 1);
  EXPECT_EQ(SetsFor(mission, L2State::kWarm, (4 << 20) - 1), 0);
}

TEST(KernelName, SaysWhatTheKernelIs) {
  BenchShape shape = Parsed("1x8x512x64,causal,paged");
  const KernelSpec spec = SpecFor(shape.attention, Arch::kSm80, Accumulate::kFloat16);
  EXPECT_EQ(KernelName(spec), "sm80_float16_d64_float16");
}

}  // namespace
}  // namespace flashcore::kernels
