#include "server/request/sequence_id.h"

#include <array>
#include <string>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

// Bits that were 0, and 1, in some of `ids`.
struct Seen {
  void Add(SequenceId id) {
    const std::string bytes = id.ToBytes();
    for (size_t i = 0; i < zeros.size(); ++i) {
      zeros[i] |= static_cast<uint8_t>(~bytes[i]);
      ones[i] |= static_cast<uint8_t>(bytes[i]);
    }
  }
  std::array<uint8_t, SequenceId::kBytes> zeros{}, ones{};
};

// Each bit is wrong with a probability of 2^-199.
TEST(SequenceIdTest, EveryBitIsRandom) {
  Seen of_any, of_the_only_device;
  for (int i = 0; i < 200; ++i) {
    of_any.Add(SequenceId::Random());
    of_the_only_device.Add(SequenceId::Random(0, 1));
  }
  for (const Seen& seen : {of_any, of_the_only_device}) {
    for (size_t i = 0; i < SequenceId::kBytes; ++i) {
      EXPECT_EQ(seen.zeros[i], 0xff) << "byte " << i;
      EXPECT_EQ(seen.ones[i], 0xff) << "byte " << i;
    }
  }
}

TEST(SequenceIdTest, BelongsToItsDevice) {
  for (const size_t devices : {1, 2, 3, 8, 300}) {
    for (size_t device = 0; device < devices; ++device) {
      EXPECT_EQ(SequenceId::Random(device, devices).DeviceOf(devices), device);
    }
  }
}

TEST(SequenceIdTest, IsItsBytes) {
  const SequenceId id = SequenceId::Random();
  EXPECT_EQ(SequenceId::FromBytes(id.ToBytes()), id);
  EXPECT_EQ(SequenceId::FromBytes(id.ToBytes().substr(1)), std::nullopt);
  EXPECT_EQ(SequenceId::FromBytes(id.ToBytes() + "x"), std::nullopt);
}

}  // namespace
}  // namespace flashcore::server
