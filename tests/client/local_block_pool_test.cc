#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "client/local/block_pool.h"
#include "gtest/gtest.h"
#include "tests/client/fake_local_server.h"

namespace flashcore::client::local {
namespace {

class BlockPoolTest : public ::testing::Test {
 protected:
  static constexpr size_t kQuarter = BlockPool::kRegionBytes / 4;

  static std::shared_ptr<Connection> Connect(const std::string& path) {
    std::shared_ptr<Connection> connection;
    EXPECT_TRUE(Connection::Connect(path, &connection).ok());
    EXPECT_TRUE(connection->Hello("test", SteadyTime::max()).ok());
    return connection;
  }
  BlockPool::Block Allocate(size_t bytes) {
    BlockPool::Block block;
    EXPECT_TRUE(pool_.Allocate(bytes, SteadyTime::max(), &block).ok());
    return block;
  }

  // All of a region, whose quarters were in use before and were given back in `order`.
  BlockPool::Block WholeAfter(const std::array<int, 4>& order) {
    std::vector<BlockPool::Block> blocks(4);
    for (BlockPool::Block& block : blocks) block = Allocate(kQuarter);
    for (const int i : order) blocks[i].Reset();
    return Allocate(BlockPool::kRegionBytes);
  }

  FakeLocalServer server_;
  BlockPool pool_{Connect(server_.path())};
};

TEST_F(BlockPoolTest, FreeBlocksJoinInAnyOrder) {
  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    const BlockPool::Block whole = WholeAfter(order);
    EXPECT_EQ(whole.offset(), 0u);
    ASSERT_EQ(server_.regions(), 1u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(BlockPoolTest, NoMemoryIsGivenOutTwice) {
  std::array<int, 4> order = {0, 1, 2, 3};
  do {
    const BlockPool::Block whole = WholeAfter(order);
    const BlockPool::Block other = Allocate(BlockPool::kAlignment);
    EXPECT_NE(other.region_id(), whole.region_id());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(BlockPoolTest, ABlockLiesWhereThereIsRoom) {
  BlockPool::Block a = Allocate(kQuarter), b = Allocate(kQuarter), c = Allocate(2 * kQuarter);
  b.Reset();
  EXPECT_EQ(Allocate(kQuarter).offset(), kQuarter);
  EXPECT_EQ(server_.regions(), 1u);
  const BlockPool::Block larger = Allocate(kQuarter + 1);
  EXPECT_EQ(server_.regions(), 2u);
  EXPECT_NE(larger.region_id(), a.region_id());
}

}  // namespace
}  // namespace flashcore::client::local
