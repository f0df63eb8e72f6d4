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

using testing::PlanCounts;

// Launches of many rows are executed in parts. Between them others run, clients cancel and delete.
constexpr bool kInParts = true;

class SequencesPropertyTest : public ::testing::TestWithParam<testing::DeviceSetting> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_none(); !why.empty()) GTEST_SKIP() << why;
  }

  std::unique_ptr<SequenceWorld> MakeWorld(bool in_parts = false) {
    const testing::DeviceSetting& setting = GetParam();
    // On the CPU some requests still share launches. For a GPU any request is small.
    const Nanoseconds part(setting.name == "cpu" ? 20'000 : 1);
    auto device = std::make_unique<testing::PlanProbe>(
        setting.make(size_t{3} << 20, size_t{320} << 10, &clock_), &counts_);
    // Beyond two splits of every kernel.
    const SequenceWorld::Setup setup = {
        /*exact=*/false,          setting.copy,
        /*length=*/1300,          &clock_,
        /*limits_clock=*/nullptr, in_parts ? part : Nanoseconds(0)};
    return std::make_unique<SequenceWorld>(std::move(device), setup);
  }

  SteadyClock clock_;
  PlanCounts counts_;
};

class SequencesPropertyStressTest : public SequencesPropertyTest {};

TEST_P(SequencesPropertyTest, AgreesWithTheModel) {
  ExpectAgreesWithTheModel(MakeWorld().get(), TestSeed());
}

TEST_P(SequencesPropertyTest, AgreesWithTheModelInParts) {
  const auto enough = [&] { return counts_.parts > 0; };
  ExpectAgreesWithTheModel(MakeWorld(kInParts).get(), TestSeed(), enough);
}

TEST_P(SequencesPropertyStressTest, AgreesInEveryOutcome) {
  ExpectAgreesInEveryOutcome(MakeWorld().get(), TestSeed(), [&] { return counts_.enough(); });
}

TEST_P(SequencesPropertyStressTest, AgreesInEveryOutcomeInParts) {
  const auto enough = [&] { return counts_.parts > 100; };
  ExpectAgreesInEveryOutcome(MakeWorld(kInParts).get(), TestSeed(), enough, /*rounds=*/2);
}

const auto name_of = [](const auto& param) { return param.param.name; };
INSTANTIATE_TEST_SUITE_P(Devices, SequencesPropertyTest,
                         ::testing::ValuesIn(testing::RealDevices()), name_of);
INSTANTIATE_TEST_SUITE_P(Devices, SequencesPropertyStressTest,
                         ::testing::ValuesIn(testing::RealDevices()), name_of);

}  // namespace
}  // namespace flashcore::server
