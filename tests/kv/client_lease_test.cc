// Leases of clients: the end of one deletes the sequences that name it, and no others.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using absl::StatusCode;
using std::chrono::seconds;
using ::testing::StartsWith;

const Identity kAlice = {"alice", {}};
const Identity kBob = {"bob", {}};

class ClientLeaseTest : public testing::SequenceStoreTest {
 protected:
  LeaseId OpenLease(const Identity& identity = kAlice) {
    const LeaseId id = LeaseId::Random();
    store_->OpenLease(id, identity);
    return id;
  }
  // Deletes the orphans; returns how many.
  int DeleteOrphans() {
    int deleted = 0;
    while (store_->DeleteOrphan()) ++deleted;
    return deleted;
  }
  static SequenceSettings Leased(LeaseId lease) {
    SequenceSettings settings;
    settings.shared = true;
    settings.lease = lease;
    return settings;
  }
  // A sequence of `rows` rows.
  SequenceId Make(const SequenceSettings& settings, size_t rows = 3) {
    const SequenceId id = store_->Create(Shape(), settings, kAlice).value().id;
    EXPECT_EQ(Append(id, testing::Rows(rows, 'x')), absl::OkStatus());
    return id;
  }
  SequenceId ForkOf(SequenceId id, const SequenceSettings& settings) {
    return store_->Fork(id, {}, settings, kAlice).value().id;
  }
};

TEST_F(ClientLeaseTest, ItsEndDeletesItsSequencesAlone) {
  const LeaseId lease = OpenLease(), other = OpenLease();
  const SequenceId leased = Make(Leased(lease), 100);
  const SequenceId kept = Make({}), of_other = Make(Leased(other));
  const SequenceId leased_fork = ForkOf(kept, Leased(lease));
  const SequenceId kept_fork = ForkOf(leased, {});  // nothing is inherited
  EXPECT_EQ(store_->Get(leased, kAlice)->settings.lease, lease);
  EXPECT_FALSE(store_->Get(kept_fork, kAlice)->settings.lease.has_value());
  EXPECT_EQ(DeleteOrphans(), 0);
  store_->CloseLease(lease);
  EXPECT_EQ(DeleteOrphans(), 2);
  EXPECT_EQ(metrics_.sequences_orphaned.Value(), 2u);
  for (const SequenceId id : {leased, leased_fork}) EXPECT_FALSE(Exists(id));
  for (const SequenceId id : {kept, of_other, kept_fork}) EXPECT_TRUE(Exists(id));
  EXPECT_EQ(Length(kept_fork), 100u);
  EXPECT_EQ(Text(kept_fork), testing::Rows(100, 'x'));
  for (const SequenceId id : {kept, kept_fork})
    EXPECT_EQ(store_->Delete(id, kAlice).code(), StatusCode::kOk);
  store_->CloseLease(other);
  EXPECT_EQ(DeleteOrphans(), 1);
  EXPECT_EQ(Pages(), 0u);
  EXPECT_EQ(store_->stats().metadata_bytes, 0u);
}

TEST_F(ClientLeaseTest, IsOfOneClientWhileItIsOpen) {
  const SequenceId parent = Make(Leased(OpenLease()));  // shared
  const LeaseId closed = OpenLease(kBob);
  store_->CloseLease(closed);
  store_->CloseLease(closed);  // does nothing
  const std::string unknown(
      store_->Create(Shape(), Leased(LeaseId::Random()), kBob).status().message());
  EXPECT_THAT(unknown, StartsWith("lease_id: "));
  for (const LeaseId lease : {OpenLease(kAlice), closed}) {
    for (const absl::Status& status : {store_->Create(Shape(), Leased(lease), kBob).status(),
                                       store_->Fork(parent, {}, Leased(lease), kBob).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kNotFound);
      EXPECT_EQ(status.message(), unknown);
    }
  }
  EXPECT_EQ(store_->stats().sequences, 1u);
}

TEST_F(ClientLeaseTest, SequencesMayGoBeforeIt) {
  SequenceStore::Options options;
  options.evict_lru = true;
  options.client_sequences = 4;
  Open(options);
  const LeaseId lease = OpenLease();
  SequenceSettings expiring = Leased(lease);
  expiring.idle_timeout = seconds(1);
  const SequenceId expired = Make(expiring);
  clock_.Advance(seconds(2));
  store_->ExpireIdle();
  EXPECT_FALSE(Exists(expired));
  const SequenceId evicted = Make(Leased(lease)), deleted = Make(Leased(lease));
  const SequenceId orphan = Make(Leased(lease));
  for (int i = 0; i < 2; ++i) Make({});
  EXPECT_FALSE(Exists(evicted));
  EXPECT_EQ(store_->Delete(deleted, kAlice), absl::OkStatus());
  const SequenceId last = Make(Leased(lease));
  store_->CloseLease(lease);
  EXPECT_EQ(store_->Delete(orphan, kAlice), absl::OkStatus());  // before its turn
  EXPECT_EQ(DeleteOrphans(), 1);
  EXPECT_FALSE(Exists(last));
  EXPECT_EQ(store_->stats().sequences, 2u);
}

TEST_F(ClientLeaseTest, ARunningRequestIsAnswered) {
  const LeaseId lease = OpenLease();
  const SequenceId id = Make(Leased(lease), 100);
  const testing::OperationPtr running = Lease({{id, "y"}}), waiting = Lease({{id, ""}});
  const std::unique_ptr<Launch> launch = Begin({running.get()});
  store_->CloseLease(lease);
  EXPECT_EQ(DeleteOrphans(), 1);
  EXPECT_EQ(Text(*launch), testing::Rows(100, 'x') + "y");
  EXPECT_GT(Pages(), 0u);
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 0u);
  const std::unique_ptr<Launch> late = Begin({waiting.get()});
  ASSERT_EQ(late->refused.size(), 1u);
  EXPECT_EQ(late->refused[0].second.code(), StatusCode::kNotFound);
  store_->EndLaunch(*late, true);
}

// Each maker has a fixed number of tries, and one of them ends the lease between two of its own: so
// no thread waits for another's progress.
TEST_F(ClientLeaseTest, NoSequenceOutlivesItHoweverTheyRace) {
  Open({}, /*pages=*/256);
  const SequenceId prefix = Make({}, 10);
  constexpr int kRounds = 40, kMakers = 3, kTries = 8;
  std::atomic<int> made{0};
  for (int round = 0; round < kRounds; ++round) {
    const LeaseId lease = OpenLease();
    const int end = round % kTries;  // the first maker's try before which it ends the lease
    absl::Notification started;
    std::vector<std::thread> makers;
    for (int i = 0; i < kMakers; ++i) {
      makers.emplace_back([&, i] {
        bool open = true;
        started.WaitForNotification();
        for (int n = 0; n < kTries; ++n) {
          if (i == 0 && n == end) {
            store_->CloseLease(lease);
            DeleteOrphans();
          }
          const auto info = i == 0 ? store_->Create(Shape(), Leased(lease), kAlice)
                                   : store_->Fork(prefix, {}, Leased(lease), kAlice);
          EXPECT_TRUE(info.ok() || absl::IsNotFound(info.status())) << info.status();
          EXPECT_TRUE(open || !info.ok()) << "it opened again";
          open = info.ok();
          EXPECT_TRUE(i != 0 || open == (n < end));
          if (open) ++made;
          if (open && i == 2) store_->Delete(info->id, kAlice).IgnoreError();
        }
      });
    }
    started.Notify();
    for (std::thread& maker : makers) maker.join();
    ASSERT_FALSE(store_->DeleteOrphan()) << "the last call found them all";
    ASSERT_EQ(store_->stats().sequences, 1u);
    for (const auto& late : {store_->Create(Shape(), Leased(lease), kAlice),
                             store_->Fork(prefix, {}, Leased(lease), kAlice)}) {
      ASSERT_EQ(late.status().code(), StatusCode::kNotFound);
    }
  }
  EXPECT_GE(made, kRounds / kTries * (kTries * (kTries - 1) / 2)) << "those of the first makers";
  EXPECT_EQ(Pages(), 1u);
}

}  // namespace
}  // namespace flashcore::server
