// The whole engine under random interleavings of many threads, compared with a plain model: every
// output, every length, every page count, and every byte of every sequence. Sequences are long
// enough that kernels split their K/V and share the prefixes of forks.
#include <chrono>
#include <functional>
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

class SequencesPropertyTest : public ::testing::TestWithParam<testing::DeviceSetting> {
 protected:
  static void Run(Nanoseconds max_launch, testing::PlanCounts* counts,
                  const std::function<bool()>& enough) {
    const testing::DeviceSetting& setting = GetParam();
    if (const std::string why = setting.why_none(); !why.empty()) GTEST_SKIP() << why;
    const SteadyClock clock;
    auto device = std::make_unique<testing::PlanProbe>(
        setting.make(size_t{3} << 20, size_t{320} << 10, &clock), counts);
    // Beyond two splits of every kernel.
    SequenceWorld world(std::move(device), {/*exact=*/false, setting.copy, /*length=*/1300, &clock,
                                            /*limits_clock=*/nullptr, max_launch});
    ExpectAgreesWithTheModel(&world, TestSeed(), enough, world.cuts() ? 2 : 6);
  }
};

TEST_P(SequencesPropertyTest, AgreesWithTheModel) {
  testing::PlanCounts counts;
  Run(Nanoseconds(0), &counts, [&] { return counts.enough(); });
}

// Launches of many rows are executed in parts. Between them others run, clients cancel and delete.
TEST_P(SequencesPropertyTest, AgreesWithTheModelInParts) {
  testing::PlanCounts counts;
  // On the CPU some requests still share launches. For a GPU any request is small.
  const bool is_cpu = GetParam().name == "cpu";
  Run(Nanoseconds(is_cpu ? 20'000 : 1), &counts, [&] { return counts.parts > 100; });
}

INSTANTIATE_TEST_SUITE_P(Devices, SequencesPropertyTest,
                         ::testing::ValuesIn(testing::RealDevices()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace flashcore::server
