#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
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

  std::shared_ptr<Connection> Connect() {
    server_.on_request = [this](const v1::LocalRequest& request, v1::LocalReply* reply) {
      if (!request.has_register_memory() || server_.regions() < most_regions_) return false;
      reply->mutable_status()->set_code(kResourceExhausted);
      return true;
    };
    std::shared_ptr<Connection> connection;
    EXPECT_TRUE(Connection::Connect(server_.path(), &connection).ok());
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

  std::atomic<size_t> most_regions_{SIZE_MAX};  // the client's quota
  FakeLocalServer server_;
  BlockPool pool_{Connect()};
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

TEST_F(BlockPoolTest, UnusedRegionsAreGivenBackAtTheQuota) {
  const BlockPool::Block used = Allocate(BlockPool::kRegionBytes);
  Allocate(BlockPool::kRegionBytes);
  most_regions_ = 2;
  const BlockPool::Block larger = Allocate(BlockPool::kRegionBytes + 1);
  EXPECT_EQ(server_.regions(), 2u);
  BlockPool::Block refused;
  EXPECT_EQ(pool_.Allocate(kQuarter, SteadyTime::max(), &refused).code, kResourceExhausted);
}

}  // namespace
}  // namespace flashcore::client::local
