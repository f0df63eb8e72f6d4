// SequenceStore: create, fork, truncate and delete sequences; quotas, expiry and eviction.
#include "server/kv/sequence_store.h"

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/has_info.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::HasInfo;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::OperationPtr;
using testing::Rows;
using testing::SequenceStoreTest;

using absl::StatusCode;
using std::chrono::seconds;

TEST_F(SequenceStoreTest, CreateTellsOfAnEmptySequence) {
  const SequenceInfo info = *store_->Create(Shape(3), {/*pin=*/true}, {"alice", {}});
  EXPECT_THAT(info.layer_lengths, ElementsAre(0, 0, 0));
  EXPECT_EQ(info.shape.num_layers, 3u);
  EXPECT_EQ(info.kv_bytes, 0u);
  EXPECT_TRUE(info.settings.pin);
  EXPECT_EQ(store_->stats().sequences, 1u);
  EXPECT_EQ(Pages(), 0u);
}

TEST_F(SequenceStoreTest, IdsDiffer) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(ids.insert(Create().ToBytes()).second);
}

TEST_F(SequenceStoreTest, RefusesShapesBeyondTheLimitsAndSaysWhich) {
  SequenceStore::Options options;
  options.max_layers = 4;
  options.max_heads = 3;
  Open(options);
  const auto refusal = [&](SequenceShape shape) {
    const absl::Status status = store_->Create(shape, {false}, {"alice", {}}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  constexpr auto kFloat16 = kernels::DType::kFloat16;
  EXPECT_THAT(refusal({0, 1, 32, kFloat16}), HasSubstr("num_layers: 0 is not in 1..4"));
  EXPECT_THAT(refusal({5, 1, 32, kFloat16}), HasSubstr("num_layers: 5 is not in 1..4"));
  EXPECT_THAT(refusal({1, 0, 32, kFloat16}), HasSubstr("num_kv_heads: 0 is not in 1..3"));
  EXPECT_THAT(refusal({1, 4, 32, kFloat16}), HasSubstr("num_kv_heads: 4 is not in 1..3"));
  EXPECT_THAT(refusal({1, 1, 48, kFloat16}), HasSubstr("head_dim: 48 is not one of 32, 64"));
  EXPECT_THAT(refusal({1, 1, 32, kernels::DType::kBFloat16}),
              HasSubstr("dtype: bfloat16 is not one of float16"));
  EXPECT_THAT(refusal({1, 2, 32, kFloat16}), HasSubstr("need pages of 16384 bytes; at most 8192"));
  EXPECT_EQ(store_->stats().sequences, 0u);
}

constexpr kernels::KvDType k8BitTypes[] = {kernels::KvDType::kInt8, kernels::KvDType::kFloat8E4M3};

TEST_F(SequenceStoreTest, StoresOnlyWhatTheDeviceReads) {
  for (const kernels::KvDType kv_dtype : k8BitTypes) {
    const auto create = [&](uint32_t head_dim) {
      SequenceShape shape = Shape();
      shape.head_dim = head_dim;
      shape.kv_dtype = kv_dtype;
      return store_->Create(shape, {}, {"alice", {}});
    };
    const std::string of = absl::StrCat("kv_dtype: the device has no kernels for ",
                                        kernels::Name(kv_dtype), " K/V of head_dim ");
    Open();
    EXPECT_EQ(create(32).status(), absl::UnimplementedError(of + "32; it has none"));
    OpenWith8Bit();
    EXPECT_EQ(create(64).status(), absl::UnimplementedError(of + "64; it has those of 32"));
    EXPECT_EQ(create(kHeadDim)->shape.kv_dtype, kv_dtype);
  }
}

TEST_F(SequenceStoreTest, EightBitsTakeHalfTheMemoryAndForksHaveThem) {
  for (const kernels::KvDType kv_dtype : k8BitTypes) {
    OpenWith8Bit();
    const SequenceId plain = Load(std::string(64, 'a')), id = Create8Bit(kv_dtype);
    ASSERT_EQ(Append(id, std::string(64, 'a')), absl::OkStatus());
    constexpr size_t k8BitPageBytes = 2 * 64 * (kHeadDim + 2);
    EXPECT_EQ(store_->Get(plain, {"alice", {}})->kv_bytes, kPageBytes);
    EXPECT_EQ(store_->Get(id, {"alice", {}})->kv_bytes, k8BitPageBytes);
    const SequenceId fork = Fork(id, 10);
    EXPECT_EQ(store_->Get(fork, {"alice", {}})->shape.kv_dtype, kv_dtype);
    ASSERT_EQ(Append(fork, "bc"), absl::OkStatus());  // copies the page
    EXPECT_EQ(store_->stats().hot.used_bytes + store_->stats().cold.used_bytes,
              kPageBytes + 2 * k8BitPageBytes);
  }
}

TEST_F(SequenceStoreTest, LimitsTheSequencesOfEachClient) {
  SequenceStore::Options options;
  options.client_sequences = 2;
  Open(options);
  const SequenceId first = Create();
  const SequenceId second = Create();
  const absl::Status refused = store_->Create(Shape(), {false}, {"alice", {}}).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(
      refused,
      HasInfo("QUOTA_EXCEEDED",
              {{"limit", "client_sequences"}, {"needed", "1"}, {"used", "2"}, {"allowed", "2"}}));
  EXPECT_EQ(store_->Fork(first, {}, {false}, {"alice", {}}).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(store_->Fork(first, {}, {false}, {"bob", {}}).ok());
  ASSERT_EQ(store_->Delete(second, {"alice", {}}), absl::OkStatus());
  EXPECT_TRUE(store_->Fork(first, {}, {false}, {"alice", {}}).ok());
}

TEST_F(SequenceStoreTest, LimitsTheKvBytesThatTheSequencesOfAClientTook) {
  SequenceStore::Options options;
  options.client_kv_bytes = 2 * kPageBytes;
  Open(options);
  const SequenceId a = Load(Rows(128, 'a'));
  const absl::Status refused = Append(a, "b");
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("hold 16384 of 16384 bytes"));
  EXPECT_EQ(Text(a), Rows(128, 'a'));

  // Bob pays for what he shares, and Alice no longer for what she has dropped.
  const SequenceId fork = store_->Fork(a, 64, {}, {"bob", {}})->id;
  EXPECT_EQ(Append({{fork, Rows(65, 'c')}}, 0, "bob").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Append({{fork, Rows(64, 'c')}}, 0, "bob"), absl::OkStatus());
  EXPECT_EQ(store_->Fork(a, {}, {}, {"bob", {}}).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store_->Fork(a, 64, {}, {"bob", {}}).ok()) << "it has paid for this page";
  ASSERT_EQ(store_->Delete(a, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 2u);
  Load(Rows(128, 'b'));
}

TEST_F(SequenceStoreTest, NobodyHoldsAPageAtTheCostOfAnother) {
  SequenceStore::Options options;
  options.client_kv_bytes = 3 * kPageBytes;
  Open(options);
  const SequenceId a = Load(Rows(70, 'a'));
  const SequenceId b = store_->Fork(a, {}, {/*pin=*/false, /*shared=*/true}, {"bob", {}})->id;
  ASSERT_TRUE(store_->Delete(a, {"alice", {}}).ok());
  const SequenceId again = Fork(b);  // now Alice is the one who borrows
  ASSERT_TRUE(store_->Delete(b, {"bob", {}}).ok());
  EXPECT_EQ(Text(again), Rows(70, 'a'));
  EXPECT_EQ(Append(again, Rows(58, 'b')), absl::OkStatus());
  EXPECT_EQ(Append(again, Rows(64, 'b')), absl::OkStatus());
  EXPECT_EQ(Append(again, "b").code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(store_->Delete(again, {"alice", {}}).ok());
  EXPECT_EQ(Pages(), 0u);
  Load(Rows(3 * 64, 'c'));
}

TEST_F(SequenceStoreTest, ALeaseOutlivesTheAccountsOfASharedPage) {
  const SequenceId a = Load(Rows(70, 'a'));
  const SequenceId b = store_->Fork(a, {}, {}, {"bob", {}})->id;
  const OperationPtr read_a = Lease({{a, ""}});
  const OperationPtr read_b = Lease({{b, "b"}}, 0, "bob");
  const auto launch = Begin({read_a.get(), read_b.get()});
  ASSERT_TRUE(store_->Delete(b, {"bob", {}}).ok());
  ASSERT_TRUE(store_->Delete(a, {"alice", {}}).ok());
  EXPECT_EQ(Text(*launch, 0), Rows(70, 'a'));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 0u);
}

TEST_F(SequenceStoreTest, LimitsTheMetadataOfAllSequencesTogether) {
  const SequenceId parent = Load(Rows(640, 'p'));
  const size_t created_bytes = store_->stats().metadata_bytes;
  const SequenceId child = Fork(parent);
  const size_t forked_bytes = store_->stats().metadata_bytes - created_bytes;
  EXPECT_EQ(forked_bytes, created_bytes + 10 * (sizeof(PageId) + sizeof(int32_t)));
  ASSERT_EQ(store_->Delete(child, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(store_->stats().metadata_bytes, created_bytes);

  SequenceStore::Options options;
  options.metadata_bytes = 3 * created_bytes;
  Open(options);
  const SequenceId full = Load(Rows(640, 'f'));
  Create();
  EXPECT_EQ(store_->Fork(full, {}, {false}, {"bob", {}}).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(store_->Fork(full, 0, {false}, {"bob", {}}).ok());
  EXPECT_EQ(store_->Create(Shape(), {false}, {"bob", {}}).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->stats().metadata_bytes, 3 * created_bytes);
}

TEST_F(SequenceStoreTest, AForkSharesThePages) {
  const SequenceId parent = Load(Rows(64, 'a') + Rows(64, 'b') + Rows(2, 'c'));
  const SequenceInfo whole = *store_->Fork(parent, {}, {false, true}, {"bob", {}});
  const SequenceInfo part = *store_->Fork(parent, 65, {false, true}, {"bob", {}});
  EXPECT_THAT(whole.layer_lengths, ElementsAre(130));
  EXPECT_THAT(part.layer_lengths, ElementsAre(65));
  EXPECT_EQ(whole.kv_bytes, 3 * kPageBytes);
  EXPECT_EQ(part.kv_bytes, 2 * kPageBytes);
  EXPECT_EQ(Pages(), 3u);
  EXPECT_EQ(Text(part.id), Rows(64, 'a') + "b");

  ASSERT_EQ(store_->Delete(parent, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 3u);
  ASSERT_EQ(store_->Delete(whole.id, {"bob", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 2u);
  EXPECT_EQ(Text(part.id), Rows(64, 'a') + "b");
  ASSERT_EQ(store_->Delete(part.id, {"bob", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 0u);
}

TEST_F(SequenceStoreTest, AForkHasTheRowsOfEveryLayer) {
  const SequenceId parent = Create(2);
  ASSERT_EQ(Append(parent, "aaa", 0), absl::OkStatus());
  ASSERT_EQ(Append(parent, "b", 1), absl::OkStatus());
  const SequenceId whole = Fork(parent);
  EXPECT_EQ(Text(whole, 0), "aaa");
  EXPECT_EQ(Text(whole, 1), "b");
  EXPECT_EQ(Text(Fork(parent, 1), 0), "a");
  const absl::Status refused = store_->Fork(parent, 2, {false}, {"alice", {}}).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("length: 2; layer 1 has only 1 rows"));
}

TEST_F(SequenceStoreTest, AForkOfAForkOutlivesBoth) {
  const SequenceId first = Load("first");
  const SequenceId second = Fork(first);
  ASSERT_EQ(store_->Delete(first, {"alice", {}}), absl::OkStatus());
  ASSERT_EQ(Append(second, "+second"), absl::OkStatus());  // nobody else has the page any more
  const SequenceId third = Fork(second);
  ASSERT_EQ(store_->Delete(second, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 1u);
  ASSERT_EQ(Append(third, "+third"), absl::OkStatus());
  EXPECT_EQ(Text(third), "first+second+third");
  EXPECT_EQ(Pages(), 1u);
  EXPECT_EQ(store_->Fork(first, {}, {false}, {"alice", {}}).status().code(), StatusCode::kNotFound);
}

TEST_F(SequenceStoreTest, TruncateDropsWholePagesAndKeepsTheRest) {
  const SequenceId id = Load(Rows(64, 'a') + Rows(64, 'b') + "c");
  const SequenceInfo info = *store_->Truncate(id, 66, 129, {"alice", {}});
  EXPECT_THAT(info.layer_lengths, ElementsAre(66));
  EXPECT_EQ(info.kv_bytes, 2 * kPageBytes);
  EXPECT_EQ(Pages(), 2u);
  ASSERT_EQ(Append(id, "d"), absl::OkStatus());
  EXPECT_EQ(Text(id), Rows(64, 'a') + "bbd");
  ASSERT_TRUE(store_->Truncate(id, 64, {}, {"alice", {}}).ok());
  EXPECT_EQ(Pages(), 1u);
  ASSERT_TRUE(store_->Truncate(id, 0, {}, {"alice", {}}).ok());
  EXPECT_EQ(Pages(), 0u);
  ASSERT_EQ(Append(id, "e"), absl::OkStatus());
  EXPECT_EQ(Text(id), "e");
}

TEST_F(SequenceStoreTest, TruncateRefusesWhatItCannotKeep) {
  const SequenceId id = Create(2);
  ASSERT_EQ(Append(id, "aaa", 0), absl::OkStatus());
  ASSERT_EQ(Append(id, "b", 1), absl::OkStatus());
  EXPECT_EQ(store_->Truncate(id, 2, {}, {"alice", {}}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->Truncate(id, 1, 1, {"alice", {}}).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Truncate(SequenceId{}, 0, {}, {"alice", {}}).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(Text(id, 0), "aaa");
  ASSERT_TRUE(store_->Truncate(id, 1, 3, {"alice", {}}).ok());
  EXPECT_EQ(Text(id, 0), "a");
  EXPECT_EQ(Text(id, 1), "b");
}

TEST_F(SequenceStoreTest, ADeletedSequenceIsGone) {
  const SequenceId id = Load("text");
  ASSERT_EQ(store_->Delete(id, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 0u);
  EXPECT_EQ(store_->stats().sequences, 0u);
  EXPECT_EQ(store_->stats().metadata_bytes, 0u);
  const absl::Status again = store_->Delete(id, {"alice", {}});
  EXPECT_EQ(again.code(), StatusCode::kNotFound);
  EXPECT_EQ(again.message(),
            "sequence_id: no such sequence: it was deleted or evicted, has expired or never "
            "existed; there is nothing to delete");
  const absl::Status get = store_->Get(id, {"alice", {}}).status();
  EXPECT_EQ(get.code(), StatusCode::kNotFound);
  EXPECT_THAT(std::string(get.message()), HasSubstr("load its K/V again"));
  for (const absl::Status& status : {again, get}) {
    EXPECT_THAT(status,
                HasInfo("SEQUENCE_LOST",
                        {{"sequence_ids", absl::BytesToHexString(id.ToBytes())}, {"lost", "1"}}));
  }
  EXPECT_EQ(store_->Lease(MakeOperation({{id, ""}}).get()).code(), StatusCode::kNotFound);
}

TEST_F(SequenceStoreTest, ALeaseNamesAllLostSequences) {
  const SequenceId here = Load("a");
  const SequenceId lost = SequenceId::Random();
  const SequenceId also = SequenceId::Random();
  const absl::Status refused =
      store_->Lease(MakeOperation({{here, ""}, {lost, "x"}, {here, ""}, {also, ""}}).get());
  EXPECT_EQ(refused.code(), StatusCode::kNotFound);
  EXPECT_EQ(refused.message(),
            "spans[1].sequence_id, spans[3].sequence_id: no such sequence: it was deleted or "
            "evicted, has expired or never existed; load its K/V again");
  EXPECT_THAT(refused, HasInfo("SEQUENCE_LOST",
                               {{"sequence_ids", absl::BytesToHexString(lost.ToBytes()) + "," +
                                                     absl::BytesToHexString(also.ToBytes())},
                                {"spans", "1,3"},
                                {"lost", "2"}}));
}

TEST_F(SequenceStoreTest, LeasesOnlyWhatFitsTheRequest) {
  const SequenceId id = Create();
  const auto refusal = [&](const std::vector<Part>& parts, auto change) {
    const OperationPtr operation = MakeOperation(parts);
    change(&operation->request);
    const absl::Status status = store_->Lease(operation.get());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(operation->sequences.empty());
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({{id, ""}}, [](AttendRequest* r) { r->layer = 1; }), HasSubstr("layer: 1"));
  EXPECT_THAT(refusal({{id, ""}}, [](AttendRequest* r) { r->num_kv_heads = 2; }),
              HasSubstr("num_kv_heads: 2; the sequence of spans[0] has 1"));
  EXPECT_THAT(refusal({{id, ""}}, [](AttendRequest* r) { r->head_dim = 64; }),
              HasSubstr("head_dim: 64"));
  EXPECT_THAT(refusal({{id, ""}}, [](AttendRequest* r) { r->dtype = kernels::DType::kBFloat16; }),
              HasSubstr("dtype: "));
  EXPECT_THAT(refusal({{Create(), ""}, {id, ""}, {id, ""}}, [](AttendRequest*) {}),
              HasSubstr("spans[2].sequence_id: names a sequence that an earlier span names too"));
  clock_.Advance(seconds(1));
  EXPECT_EQ(store_->Get(id, {"alice", {}})->idle, seconds(1)) << "a refused request holds a lease";
}

TEST_F(SequenceStoreTest, LeasesOnlySequencesThatStoreTheSame) {
  OpenWith8Bit();
  const SequenceId plain = Create(), first = Create8Bit(), second = Create8Bit();
  const SequenceId e4m3 = Create8Bit(kernels::KvDType::kFloat8E4M3);
  const auto lease = [&](AttendOperation* operation) {
    const absl::Status status = store_->Lease(operation);
    EXPECT_EQ(operation->sequences.empty(), !status.ok());
    return status;
  };
  const OperationPtr mixed = MakeOperation({{first, ""}, {plain, ""}});
  EXPECT_EQ(lease(mixed.get()),
            absl::InvalidArgumentError("spans[1].sequence_id: its kv_dtype is same_as_query; that "
                                       "of the sequence of spans[0] is int8"));
  const OperationPtr both_types = MakeOperation({{first, ""}, {e4m3, ""}});
  EXPECT_EQ(lease(both_types.get()),
            absl::InvalidArgumentError("spans[1].sequence_id: its kv_dtype is float8_e4m3; that of "
                                       "the sequence of spans[0] is int8"));
  for (const bool inline_first : {true, false}) {
    const OperationPtr beside = MakeOperation({{first, "a"}, {second, "b"}});
    beside->request.spans[inline_first ? 0 : 1].sequence_id = "";
    EXPECT_EQ(lease(beside.get()), absl::InvalidArgumentError(absl::StrCat(
                                       "spans[", inline_first ? 0 : 1,
                                       "]: inline K/V beside a sequence whose kv_dtype is int8")));
  }
  const OperationPtr both = MakeOperation({{first, ""}, {second, ""}});
  EXPECT_EQ(lease(both.get()), absl::OkStatus());
  EXPECT_EQ(both->request.geometry().kv_dtype, kernels::KvDType::kInt8);
  both->sequences.Reset();
  for (SpanShape& span : both->request.spans) span.sequence_id = "";
  EXPECT_EQ(store_->Lease(both.get()), absl::OkStatus());
  EXPECT_EQ(both->request.geometry().kv_dtype, kernels::KvDType::kSameAsQuery);
  const OperationPtr one = MakeOperation({{plain, ""}});
  EXPECT_EQ(lease(one.get()), absl::OkStatus());
  EXPECT_EQ(one->request.geometry().kv_dtype, kernels::KvDType::kSameAsQuery);
}

TEST_F(SequenceStoreTest, IdleSequencesExpire) {
  SequenceStore::Options options;
  options.idle_timeout = seconds(10);
  Open(options);
  const SequenceId idle = Load("idle");
  const SequenceId used = Load("used");
  const SequenceId leased = Load("leased");
  OperationPtr lease = Lease({{leased, ""}});
  clock_.Advance(seconds(6));
  EXPECT_EQ(Text(used), "used");
  EXPECT_EQ(store_->Get(idle, {"alice", {}})->idle, seconds(6));
  EXPECT_EQ(store_->Get(leased, {"alice", {}})->idle, seconds(0));
  store_->ExpireIdle();
  EXPECT_TRUE(Exists(idle));

  clock_.Advance(seconds(4));
  store_->ExpireIdle();
  EXPECT_FALSE(Exists(idle));
  EXPECT_TRUE(Exists(used));
  EXPECT_TRUE(Exists(leased));
  EXPECT_EQ(Pages(), 2u);
  EXPECT_EQ(metrics_.sequences_expired.Value(), 1u);

  lease.reset();  // begins its idle time
  clock_.Advance(seconds(9));
  store_->ExpireIdle();
  EXPECT_FALSE(Exists(used));
  EXPECT_TRUE(Exists(leased));
}

TEST_F(SequenceStoreTest, WithoutATimeoutNothingExpires) {
  const SequenceId id = Create();
  clock_.Advance(std::chrono::hours(1000));
  store_->ExpireIdle();
  EXPECT_TRUE(Exists(id));
}

TEST_F(SequenceStoreTest, AFullArenaEvictsWhatWasUsedLongestAgoAndIsNotLeased) {
  SequenceStore::Options options;
  options.evict_lru = true;
  Open(options, /*pages=*/4);
  const SequenceId leased = Load("a");
  const SequenceId first = Load("b");
  const SequenceId second = Load("c");
  const SequenceId third = Load("d");
  const OperationPtr lease = Lease({{leased, ""}});
  EXPECT_EQ(Text(first), "b");  // so `second` is now the least recently used

  ASSERT_EQ(Append(third, Rows(64, 'd')), absl::OkStatus());
  EXPECT_FALSE(Exists(second));
  ASSERT_EQ(Append(third, Rows(64, 'd')), absl::OkStatus());
  EXPECT_FALSE(Exists(first));
  EXPECT_EQ(metrics_.sequences_evicted.Value(), 2u);
  EXPECT_EQ(Append(third, Rows(64, 'd')).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Exists(leased));
  EXPECT_EQ(Length(third), 129u);
}

TEST_F(SequenceStoreTest, AFullArenaTakesFromTheClientThatHoldsTheMost) {
  SequenceStore::Options options;
  options.evict_lru = true;
  Open(options, /*pages=*/8);
  const auto load = [this](const char* client, size_t pages) {
    const SequenceId id = Create(1, false, client);
    EXPECT_EQ(Append({{id, Rows(64 * pages, 'x')}}, 0, client), absl::OkStatus());
    return id;
  };
  // Those with little use theirs first.
  const SequenceId of_alice = load("alice", 1), of_bob = load("bob", 2);
  const SequenceId first = load("mallory", 1), second = load("mallory", 4);
  // The largest takes from itself whatever it does, also when its other sequence is all it has.
  const SequenceId third = load("mallory", 2);
  EXPECT_FALSE(Exists(first));
  EXPECT_FALSE(Exists(second));
  const SequenceId huge = Create(1, false, "mallory");
  EXPECT_EQ(Append({{huge, Rows(64 * 6, 'x')}}, 0, "mallory").code(),
            StatusCode::kResourceExhausted);
  EXPECT_FALSE(Exists(third));
  EXPECT_EQ(metrics_.sequences_evicted.Value(), 3u);
  // Others get a share equal to its own, and no more.
  EXPECT_EQ(Append({{huge, Rows(64 * 5, 'x')}}, 0, "mallory"), absl::OkStatus());
  EXPECT_EQ(Append({{of_alice, Rows(64, 'x')}}), absl::OkStatus());
  EXPECT_FALSE(Exists(huge));
  const SequenceId a = load("mallory", 2), b = load("mallory", 2);
  EXPECT_EQ(Append({{of_alice, Rows(64, 'x')}}), absl::OkStatus());
  EXPECT_FALSE(Exists(a));
  const SequenceId c = load("mallory", 1);
  EXPECT_EQ(Append({{of_alice, Rows(64, 'x')}}).code(), StatusCode::kResourceExhausted);
  for (const SequenceId id : {of_alice, of_bob, b, c}) EXPECT_TRUE(Exists(id));
  EXPECT_EQ(metrics_.sequences_evicted.Value(), 5u);
}

TEST_F(SequenceStoreTest, AFullArenaTakesFromTheNextWhileTheLargestUsesAll) {
  SequenceStore::Options options;
  options.evict_lru = true;
  Open(options, /*pages=*/9);
  const auto load = [this](const char* client, size_t pages) {
    const SequenceId id = Create(1, false, client);
    EXPECT_EQ(Append({{id, Rows(64 * pages, 'x')}}, 0, client), absl::OkStatus());
    return id;
  };
  const SequenceId of_bob = load("bob", 1), of_carol = load("carol", 3);
  const SequenceId of_mallory = load("mallory", 5);
  const OperationPtr lease = Lease({{of_mallory, ""}}, 0, "mallory");
  const SequenceId of_alice = load("alice", 2);
  EXPECT_FALSE(Exists(of_carol));
  for (const SequenceId id : {of_alice, of_bob, of_mallory}) EXPECT_TRUE(Exists(id));
}

TEST_F(SequenceStoreTest, WithoutEvictionAFullArenaRefuses) {
  Open({}, /*pages=*/2);
  const SequenceId idle = Load("a");
  const SequenceId id = Load("b");
  const absl::Status refused = Append(id, Rows(64, 'b'));
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("16384 of 16384 bytes are in use"));
  EXPECT_TRUE(Exists(idle));
  EXPECT_EQ(Text(id), "b");
}

TEST_F(SequenceStoreTest, ListsTheSequencesOfAClientPageByPage) {
  std::vector<SequenceId> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(Create());
    Create(1, false, "bob");
  }
  const auto list = [&](uint64_t after) {
    const SequenceStore::Listing listing = store_->List({"alice", {}}, after, {2});
    std::vector<SequenceId> listed;
    for (const SequenceInfo& info : listing.sequences) listed.push_back(info.id);
    return std::make_pair(listed, listing.next);
  };
  const auto [first, after_first] = list(0);
  EXPECT_THAT(first, ElementsAre(ids[0], ids[1]));
  const auto [second, after_second] = list(after_first);
  EXPECT_THAT(second, ElementsAre(ids[2], ids[3]));
  const auto [last, after_last] = list(after_second);
  EXPECT_THAT(last, ElementsAre(ids[4]));
  EXPECT_EQ(after_last, 0u);

  // Deleting sequences meanwhile, even the last one listed, does not disturb the rest.
  ASSERT_EQ(store_->Delete(ids[1], {"alice", {}}), absl::OkStatus());
  ASSERT_EQ(store_->Delete(ids[2], {"alice", {}}), absl::OkStatus());
  EXPECT_THAT(list(after_first).first, ElementsAre(ids[3], ids[4]));
  EXPECT_THAT(store_->List({"nobody", {}}, 0, {2}).sequences, IsEmpty());
}

TEST_F(SequenceStoreTest, MemoryOfDeletedSequencesIsGivenBackAfterFiveSeconds) {
  const auto give_back = [this] {
    while (store_->GiveBackUnneeded()) {
    }
    return given_back_ / kPageBytes;
  };
  const SequenceId kept = Load("kept");
  const SequenceId deleted = Load(Rows(130, 'x'));  // three pages
  const OperationPtr operation = Lease({{deleted, ""}});
  const std::unique_ptr<Launch> launch = Begin({operation.get()});
  clock_.Advance(seconds(100));
  EXPECT_EQ(give_back(), 0u) << "in use";
  EXPECT_EQ(store_->Delete(deleted, {"alice", {}}), absl::OkStatus());
  clock_.Advance(seconds(100));
  EXPECT_EQ(give_back(), 0u) << "a launch reads it";
  EXPECT_EQ(Text(*launch), Rows(130, 'x'));
  store_->EndLaunch(*launch, true);
  clock_.Advance(seconds(4));
  EXPECT_EQ(give_back(), 0u);
  clock_.Advance(seconds(1));
  EXPECT_EQ(give_back(), 3u);
  clock_.Advance(seconds(100));
  EXPECT_EQ(give_back(), 3u) << "once";
  EXPECT_EQ(Text(kept), "kept");
  EXPECT_EQ(Text(Load(Rows(130, 'y'))), Rows(130, 'y'));
}

}  // namespace
}  // namespace flashcore::server
