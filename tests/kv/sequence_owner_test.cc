// The owner of a sequence, who else may use it, and what one client can take from the others.
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error_info.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using absl::StatusCode;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const Identity kAlice = {"alice", {"staff", "writers"}};
const Identity kBob = {"bob", {"staff"}};
const Identity kMallory = {"mallory", {"strangers"}};

SequenceSettings Shared() { return {/*pin=*/false, /*shared=*/true}; }
SequenceSettings SharedWith(const std::string& group) {
  return {/*pin=*/false, /*shared=*/false, group};
}
SequenceSettings ExpiringAfter(Nanoseconds timeout) {
  SequenceSettings settings;
  settings.idle_timeout = timeout;
  return settings;
}

class SequenceOwnerTest : public testing::SequenceStoreTest {
 protected:
  struct Call {
    const char* name;
    bool changes;
    std::function<absl::Status(SequenceId, const Identity&)> run;
  };

  // Every call of the store that takes an id.
  std::vector<Call> Calls() {
    const auto lease = [this](SequenceId id, const std::string& text, const Identity& identity) {
      const testing::OperationPtr operation = MakeOperation({{id, text}});
      operation->identity = identity;
      return store_->Lease(operation.get());
    };
    return {
        {"Get", false, [this](auto id, auto& who) { return store_->Get(id, who).status(); }},
        {"Fork", false,
         [this](auto id, auto& who) { return store_->Fork(id, 1, {}, who).status(); }},
        {"attend", false, [=](auto id, auto& who) { return lease(id, "", who); }},
        {"append", true, [=](auto id, auto& who) { return lease(id, "x", who); }},
        {"Truncate", true,
         [this](auto id, auto& who) { return store_->Truncate(id, 1, {}, who).status(); }},
        {"Delete", true, [this](auto id, auto& who) { return store_->Delete(id, who); }},
    };
  }

  SequenceId Make(const SequenceSettings& settings) {
    const SequenceId id = store_->Create(Shape(), settings, kAlice).value().id;
    EXPECT_EQ(Append(id, "abc"), absl::OkStatus());
    return id;
  }
};

// The reason of a status, and what it tells; the values name the sequence.
std::vector<std::string> KeysOf(const absl::Status& status) {
  const ErrorInfo info = GetErrorInfo(status).value_or(ErrorInfo());
  std::vector<std::string> keys = {info.reason};
  for (const auto& [key, value] : info.metadata) keys.push_back(key);
  return keys;
}

TEST_F(SequenceOwnerTest, ASequenceExistsOnlyForThoseWhoMayReadIt) {
  const std::vector<std::pair<SequenceId, const Identity*>> foreign = {
      {Make({}), &kBob},
      {Make({}), &kMallory},
      {Make(SharedWith("staff")), &kMallory},
      {Make(SharedWith("writers")), &kBob}};
  for (const auto& [id, who] : foreign) {
    const SequenceInfo before = *store_->Get(id, kAlice);
    clock_.Advance(seconds(1));
    for (const Call& call : Calls()) {
      SCOPED_TRACE(absl::StrCat(call.name, " by ", who->name));
      const absl::Status refused = call.run(id, *who);
      EXPECT_EQ(refused.code(), StatusCode::kNotFound);
      const SequenceId unknown = SequenceId::Random();
      EXPECT_EQ(refused.message(), call.run(unknown, *who).message()) << "as for an unknown id";
      EXPECT_EQ(KeysOf(refused), KeysOf(call.run(unknown, *who)));
    }
    EXPECT_EQ(store_->Get(id, kAlice)->layer_lengths, before.layer_lengths);
    EXPECT_EQ(store_->Get(id, kAlice)->idle, before.idle + seconds(1)) << "it was not used";
    EXPECT_EQ(Text(id), "abc");
  }
}

TEST_F(SequenceOwnerTest, ASharedSequenceIsReadAndForkedByOthersAndChangedByItsOwner) {
  const std::vector<std::pair<SequenceId, const Identity*>> readable = {
      {Make(Shared()), &kMallory}, {Make(SharedWith("staff")), &kBob}};
  for (const auto& [id, who] : readable) {
    for (const Call& call : Calls()) {
      SCOPED_TRACE(absl::StrCat(call.name, " by ", who->name));
      const absl::Status status = call.run(id, *who);
      if (!call.changes) {
        EXPECT_EQ(status, absl::OkStatus());
        continue;
      }
      EXPECT_EQ(status.code(), StatusCode::kPermissionDenied);
      EXPECT_THAT(std::string(status.message()), HasSubstr("sequence_id: belongs to another"));
    }
    EXPECT_EQ(Text(id), "abc");
    for (const Call& call : Calls()) EXPECT_EQ(call.run(id, kAlice), absl::OkStatus()) << call.name;
  }
}

TEST_F(SequenceOwnerTest, AForkBelongsToTheForkerAlone) {
  const SequenceId parent = Make(Shared());
  const SequenceId fork = store_->Fork(parent, {}, {}, kBob)->id;
  EXPECT_EQ(store_->Get(fork, kAlice).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(store_->Get(fork, kBob)->settings.shared);
  EXPECT_THAT(store_->List(kBob, 0, {}).sequences, SizeIs(1));
  EXPECT_THAT(store_->List(kAlice, 0, {}).sequences, SizeIs(1));
  ASSERT_EQ(store_->Delete(parent, kAlice), absl::OkStatus());
  EXPECT_EQ(Append({{fork, "d"}}, 0, "bob"), absl::OkStatus());
  EXPECT_THAT(store_->Get(fork, kBob)->layer_lengths, ElementsAre(4));
}

TEST_F(SequenceOwnerTest, RefusesSettingsThatNobodyCanMean) {
  const auto refusal = [&](const SequenceSettings& settings) {
    return store_->Create(Shape(), settings, kAlice).status();
  };
  EXPECT_EQ(refusal(SharedWith("strangers")).code(), StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refusal(SharedWith("strangers")).message()),
              HasSubstr("does not belong to 'strangers'"));
  SequenceSettings both = SharedWith("staff");
  both.shared = true;
  EXPECT_EQ(refusal(both).code(), StatusCode::kInvalidArgument);
  const SequenceId id = Make({});
  EXPECT_EQ(store_->Fork(id, {}, SharedWith("strangers"), kAlice).status().code(),
            StatusCode::kPermissionDenied);
  EXPECT_EQ(store_->stats().sequences, 1u);

  SequenceStore::Options options;
  options.idle_timeout = seconds(60);
  Open(options);
  const absl::Status longer = refusal(ExpiringAfter(seconds(61)));
  EXPECT_EQ(longer.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(longer.message()), HasSubstr("idle_timeout_seconds: 61 is more than 60"));
  EXPECT_EQ(refusal(ExpiringAfter(seconds(60))), absl::OkStatus());
}

TEST_F(SequenceOwnerTest, ASequenceExpiresAfterItsOwnTimeout) {
  for (const seconds limit : {seconds(0), seconds(10)}) {
    SequenceStore::Options options;
    options.idle_timeout = limit;
    Open(options);
    const SequenceId soon = Make(ExpiringAfter(seconds(2)));
    const SequenceId used = Make(ExpiringAfter(seconds(2)));
    const SequenceId fork = store_->Fork(soon, {}, {}, kAlice)->id;  // not inherited
    EXPECT_EQ(store_->Get(soon, kAlice)->settings.idle_timeout, Nanoseconds(seconds(2)));
    const auto expire_after = [&](seconds passed) {
      clock_.Advance(passed);
      store_->ExpireIdle();
    };
    expire_after(seconds(1));
    EXPECT_TRUE(Exists(soon));
    EXPECT_EQ(Text(used), "abc");
    expire_after(seconds(1));
    EXPECT_FALSE(Exists(soon));
    EXPECT_TRUE(Exists(used));
    {
      const testing::OperationPtr lease = Lease({{used, ""}});
      expire_after(seconds(5));
      EXPECT_TRUE(Exists(used)) << "it is leased";
    }
    expire_after(seconds(2));
    EXPECT_FALSE(Exists(used));
    EXPECT_TRUE(Exists(fork));
    expire_after(seconds(8));
    EXPECT_EQ(Exists(fork), limit == seconds(0));
  }
}

TEST_F(SequenceOwnerTest, MetadataOfOneClientIsLimited) {
  Make({});
  const size_t each = store_->stats().metadata_bytes;
  SequenceStore::Options options;
  options.metadata_bytes = 10 * each;
  options.client_metadata_bytes = 4 * each;
  Open(options);
  for (int i = 0; i < 4; ++i) Make({});
  const absl::Status refused = store_->Create(Shape(), {}, kAlice).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("hold ", 4 * each, " of ", 4 * each)));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(store_->Create(Shape(), {}, kBob).ok());
  store_->Delete(store_->List(kAlice, 0, {}).sequences[0].id, kAlice).IgnoreError();
  EXPECT_TRUE(store_->Create(Shape(), {}, kAlice).ok());
}

TEST_F(SequenceOwnerTest, EvictionMakesRoomForMetadataToo) {
  Make({});
  const size_t each = store_->stats().metadata_bytes;
  SequenceStore::Options options;
  options.evict_lru = true;
  options.metadata_bytes = 5 * each;
  options.client_metadata_bytes = 3 * each;
  Open(options);
  const SequenceId oldest = Make({});
  const SequenceId leased = Make({});
  const testing::OperationPtr lease = Lease({{leased, ""}});
  // At the limit of the client, that client loses a sequence.
  const SequenceId of_bob = store_->Create(Shape(), {}, kBob)->id;
  const SequenceId second = Make({}), third = Make({});
  EXPECT_FALSE(Exists(oldest));
  // When all is full, the client that has the most, and the one that asks if nobody has more.
  const auto make_mallorys = [&] { return store_->Create(Shape(), {}, kMallory); };
  const auto of_mallory = make_mallorys();
  EXPECT_TRUE(Exists(second));
  const auto next = make_mallorys();
  EXPECT_FALSE(Exists(second));
  ASSERT_TRUE(of_mallory.ok());
  EXPECT_TRUE(store_->Get(of_mallory->id, kMallory).ok());
  EXPECT_TRUE(make_mallorys().ok());
  EXPECT_FALSE(store_->Get(of_mallory->id, kMallory).ok());
  ASSERT_TRUE(next.ok());
  EXPECT_TRUE(store_->Get(next->id, kMallory).ok());
  EXPECT_TRUE(store_->Get(of_bob, kBob).ok());
  EXPECT_TRUE(Exists(third));
  EXPECT_TRUE(Exists(leased));
  EXPECT_EQ(metrics_.sequences_evicted.Value(), 3u);
  EXPECT_EQ(store_->stats().metadata_bytes, 5 * each);
  // A request that can never fit evicts nothing.
  EXPECT_EQ(store_->Create(Shape(64), {}, kAlice).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(metrics_.sequences_evicted.Value(), 3u);
}

TEST_F(SequenceOwnerTest, APageOfTheListIsBoundedByItsBytes) {
  SequenceStore::Options options;
  options.max_layers = 1024;
  Open(options);
  constexpr size_t kSequences = 100, kBytes = 64 << 10;
  std::vector<SequenceId> all;
  for (size_t i = 0; i < kSequences; ++i) {
    all.push_back(store_->Create(Shape(1024), {}, kAlice)->id);
  }
  std::vector<SequenceId> listed;
  size_t pages = 0;
  uint64_t after = 0;
  do {
    const SequenceStore::Listing page = store_->List(kAlice, after, {1000, kBytes});
    EXPECT_LE(page.bytes, kBytes);
    EXPECT_LE(page.sequences.size() * 1024 * 5, kBytes);
    for (const SequenceInfo& info : page.sequences) listed.push_back(info.id);
    after = page.next;
  } while (after != 0 && ++pages < kSequences);
  EXPECT_TRUE(listed == all);
  EXPECT_GT(pages, 5u);
  EXPECT_THAT(store_->List(kAlice, 0, {1000, 1}).sequences, SizeIs(1)) << "or it would never end";
}

TEST_F(SequenceOwnerTest, PositionsInAListDoNotCountWhatOthersCreate) {
  const auto step_beside = [&](int others) {
    Open();
    EXPECT_TRUE(store_->Create(Shape(), {}, kAlice).ok());
    for (int i = 0; i < others; ++i) EXPECT_TRUE(store_->Create(Shape(), {}, kBob).ok());
    clock_.Advance(std::chrono::milliseconds(1));
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(store_->Create(Shape(), {}, kAlice).ok());
    const uint64_t first = store_->List(kAlice, 0, {1}).next;
    return store_->List(kAlice, first, {1}).next - first;
  };
  EXPECT_EQ(step_beside(0), step_beside(50));
}

}  // namespace
}  // namespace flashcore::server
