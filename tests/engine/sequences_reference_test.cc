// The property test of sequences on a device that computes with the float64 reference, whose
// launches overlap in many ways and sometimes fail. Outputs must be exact.
#include <memory>

#include "gtest/gtest.h"
#include "tests/base/test_seed.h"
#include "tests/device/device_setting.h"
#include "tests/device/reference_device.h"
#include "tests/engine/sequence_worker.h"
#include "tests/engine/sequence_world.h"

namespace flashcore::server {
namespace {

using testing::SequenceWorld;

// The reference neither splits K/V nor shares prefixes, and it is slow.
constexpr uint64_t kLength = 300;

testing::HeapDevice::Options ReferenceOptions(size_t kv_memory_bytes) {
  testing::HeapDevice::Options options;
  options.lanes = 6;
  options.kv_memory_bytes = kv_memory_bytes;
  options.kv_hot_bytes = size_t{192} << 10;
  return options;
}

class SequencesOnReferenceTest : public ::testing::Test {
 protected:
  std::unique_ptr<SequenceWorld> MakeWorld(Nanoseconds max_launch = Nanoseconds(0)) {
    return Make(size_t{768} << 10, &clock_, nullptr, max_launch);
  }
  // Launches fail at any part.
  std::unique_ptr<SequenceWorld> MakeWorldInParts() { return MakeWorld(Nanoseconds(200)); }
  // Sequences are evicted and expire, clients reach their quotas, and requests wait for staging
  // memory.
  std::unique_ptr<SequenceWorld> MakeWorldWithLimits() {
    return Make(size_t{448} << 10, &fake_clock_, &fake_clock_, Nanoseconds(0));
  }

  const unsigned seed_ = TestSeed();

 private:
  std::unique_ptr<SequenceWorld> Make(size_t kv_memory_bytes, const Clock* clock,
                                      testing::FakeClock* limits_clock, Nanoseconds max_launch) {
    auto device =
        std::make_unique<testing::ReferenceDevice>(ReferenceOptions(kv_memory_bytes), seed_);
    const SequenceWorld::Setup setup = {/*exact=*/true, testing::CopyOnHost, kLength,
                                        clock,          limits_clock,        max_launch};
    return std::make_unique<SequenceWorld>(std::move(device), setup);
  }

  SteadyClock clock_;
  testing::FakeClock fake_clock_;
};

class SequencesOnReferenceStressTest : public SequencesOnReferenceTest {};

TEST_F(SequencesOnReferenceTest, AgreesWithTheModel) {
  ExpectAgreesWithTheModel(MakeWorld().get(), seed_);
}

TEST_F(SequencesOnReferenceTest, AgreesWithTheModelInParts) {
  ExpectAgreesWithTheModel(MakeWorldInParts().get(), seed_);
}

TEST_F(SequencesOnReferenceTest, AgreesWithTheModelWithinLimits) {
  ExpectAgreesWithTheModel(MakeWorldWithLimits().get(), seed_);
}

TEST_F(SequencesOnReferenceStressTest, AgreesInEveryOutcome) {
  ExpectAgreesInEveryOutcome(MakeWorld().get(), seed_);
}

TEST_F(SequencesOnReferenceStressTest, AgreesInEveryOutcomeInParts) {
  ExpectAgreesInEveryOutcome(MakeWorldInParts().get(), seed_, nullptr, /*rounds=*/2);
}

TEST_F(SequencesOnReferenceStressTest, AgreesInEveryOutcomeWithinLimits) {
  ExpectAgreesInEveryOutcome(MakeWorldWithLimits().get(), seed_);
}

}  // namespace
}  // namespace flashcore::server
