// The whole engine under random interleavings of many threads, compared with a plain model: every
// output, every length, every page count, and every byte of every sequence. Sequences are long
// enough that kernels split their K/V and share the prefixes of forks.
#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/base/test_seed.h"
#include "tests/device/device_setting.h"
#include "tests/engine/plan_probe.h"
#include "tests/engine/sequence_worker.h"
#include "tests/engine/sequence_world.h"

namespace flashcore::server {
namespace {

using testing::SequenceWorld;

class SequencesPropertyTest : public ::testing::TestWithParam<testing::DeviceSetting> {};

TEST_P(SequencesPropertyTest, AgreesWithTheModel) {
  const testing::DeviceSetting& setting = GetParam();
  if (const std::string why = setting.why_none(); !why.empty()) GTEST_SKIP() << why;
  const SteadyClock clock;
  testing::PlanCounts counts;
  auto device = std::make_unique<testing::PlanProbe>(
      setting.make(size_t{3} << 20, size_t{320} << 10, &clock), &counts);
  // Beyond two splits of every kernel.
  SequenceWorld world(std::move(device), {/*exact=*/false, setting.copy, /*length=*/1300, &clock});
  ExpectAgreesWithTheModel(&world, TestSeed(), [&] { return counts.enough(); });
}

INSTANTIATE_TEST_SUITE_P(Devices, SequencesPropertyTest,
                         ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace flashcore::server
