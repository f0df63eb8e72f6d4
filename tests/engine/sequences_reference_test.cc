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

TEST(SequencesPropertyOnReferenceTest, AgreesWithTheModel) {
  const SteadyClock clock;
  const unsigned seed = TestSeed();
  SequenceWorld world(
      std::make_unique<testing::ReferenceDevice>(ReferenceOptions(size_t{768} << 10), seed),
      {/*exact=*/true, testing::CopyOnHost, kLength, &clock, nullptr, Nanoseconds(0)});
  ExpectAgreesWithTheModel(&world, seed);
}

// Launches fail at any part.
TEST(SequencesPropertyOnReferenceTest, AgreesWithTheModelInParts) {
  const SteadyClock clock;
  const unsigned seed = TestSeed();
  SequenceWorld world(
      std::make_unique<testing::ReferenceDevice>(ReferenceOptions(size_t{768} << 10), seed),
      {/*exact=*/true, testing::CopyOnHost, kLength, &clock, nullptr, Nanoseconds(200)});
  ExpectAgreesWithTheModel(&world, seed, nullptr, /*rounds=*/2);
}

// Sequences are evicted and expire, clients reach their quotas, and requests wait for staging
// memory.
TEST(SequencesPropertyOnReferenceTest, AgreesWithTheModelWithinLimits) {
  testing::FakeClock clock;
  const unsigned seed = TestSeed();
  SequenceWorld world(
      std::make_unique<testing::ReferenceDevice>(ReferenceOptions(size_t{448} << 10), seed),
      {/*exact=*/true, testing::CopyOnHost, kLength, &clock, &clock, Nanoseconds(0)});
  ExpectAgreesWithTheModel(&world, seed);
}

}  // namespace
}  // namespace flashcore::server
