#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/local/arena.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"

namespace flashcore::client::local {
namespace {

class ArenaTest : public ::testing::Test {
 protected:
  static constexpr size_t kQuarter = Arena::kRegionBytes / 4;

  Arena::Block Allocate(size_t bytes) {
    return arena_.Allocate(bytes, absl::InfiniteFuture()).value();
  }

  FakeLocalServer server_;
  Arena arena_{Control::Connect(server_.path(), "test", absl::InfiniteFuture()).value()};
};

TEST_F(ArenaTest, FreeBlocksJoinInAnyOrder) {
  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    std::vector<Arena::Block> blocks(4);
    for (Arena::Block& block : blocks) block = Allocate(kQuarter);
    for (const int i : order) blocks[i].Reset();
    const Arena::Block whole = Allocate(Arena::kRegionBytes);
    EXPECT_EQ(whole.offset(), 0u);
    ASSERT_EQ(server_.regions(), 1u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(ArenaTest, NoMemoryIsGivenOutTwice) {
  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    std::vector<Arena::Block> blocks(4);
    for (Arena::Block& block : blocks) block = Allocate(kQuarter);
    for (const int i : order) blocks[i].Reset();
    const Arena::Block whole = Allocate(Arena::kRegionBytes);
    const Arena::Block other = Allocate(Arena::kAlignment);
    EXPECT_NE(other.region_id(), whole.region_id());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(ArenaTest, ABlockLiesWhereThereIsRoom) {
  Arena::Block a = Allocate(kQuarter), b = Allocate(kQuarter), c = Allocate(2 * kQuarter);
  b.Reset();
  EXPECT_EQ(Allocate(kQuarter).offset(), kQuarter);
  EXPECT_EQ(server_.regions(), 1u);
  const Arena::Block larger = Allocate(kQuarter + 1);
  EXPECT_EQ(server_.regions(), 2u);
  EXPECT_NE(larger.region_id(), a.region_id());
}

}  // namespace
}  // namespace flashcore::client::local
