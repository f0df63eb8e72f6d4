// SequenceStore: what a launch names to be prefetched, and what of it counts as used.
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::OperationPtr;
using testing::Rows;
using testing::SequenceStoreTest;
using ::testing::SizeIs;

class SequencePrefetchTest : public SequenceStoreTest {
 protected:
  SequencePrefetchTest() { OpenWith(8 * kPageBytes); }

  void OpenWith(size_t prefetch_bytes, size_t hot_pages = 0) {
    SequenceStore::Options options;
    options.prefetch_bytes = prefetch_bytes;
    Open(options, 32, hot_pages);
  }

  // One with `rows` rows in each of two layers.
  SequenceId LoadTwoLayers(size_t rows, bool pin = false) {
    const SequenceId id = Create(2, pin);
    for (uint32_t layer : {0, 1}) {
      EXPECT_EQ(Append(id, Rows(rows, 'a'), layer), absl::OkStatus());
    }
    return id;
  }

  // A decode step on layer 0 that the device has prefetched for. Returns the places.
  std::vector<int32_t> Decode(const std::vector<Part>& parts) {
    const OperationPtr operation = Lease(parts);
    const auto launch = Begin({operation.get()});
    launch->prefetched = true;
    store_->End(*launch, true);
    return launch->next_pages;
  }

  size_t prefetched() { return metrics_.prefetched_bytes.Value(); }
  size_t used() { return metrics_.prefetch_used_bytes.Value(); }
};

TEST_F(SequencePrefetchTest, NamesThePagesThatTheNextLayerReads) {
  const SequenceId id = LoadTwoLayers(130);
  const OperationPtr next = Lease({{id, ""}}, 1);
  const auto places = Decode({{id, "b"}});
  const auto launch = Begin({next.get()});
  EXPECT_EQ(places, launch->pages);
  EXPECT_THAT(launch->next_pages, IsEmpty()) << "there is no layer 2";
  EXPECT_EQ(prefetched(), 3 * kPageBytes);
  EXPECT_EQ(used(), 3 * kPageBytes);
  store_->End(*launch, true);
  Text(id, 1);
  EXPECT_EQ(used(), 3 * kPageBytes) << "what is read again was not prefetched again";
}

TEST_F(SequencePrefetchTest, NothingCountsIfTheDeviceDoesNotPrefetch) {
  const SequenceId id = LoadTwoLayers(130);
  const OperationPtr operation = Lease({{id, ""}});
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(launch->next_pages, SizeIs(3));
  store_->End(*launch, true);
  Text(id, 1);
  EXPECT_EQ(prefetched(), 0u);
  EXPECT_EQ(used(), 0u);
}

TEST_F(SequencePrefetchTest, StopsAtTheBudget) {
  OpenWith(4 * kPageBytes + 1);
  const SequenceId a = LoadTwoLayers(130), b = LoadTwoLayers(130);
  EXPECT_THAT(Decode({{a, ""}, {b, ""}}), SizeIs(4));
  Text(a, 1);
  Text(b, 1);
  EXPECT_EQ(used(), 4 * kPageBytes);
}

TEST_F(SequencePrefetchTest, OnlyWhatTheMaskShows) {
  const SequenceId id = LoadTwoLayers(130);
  const OperationPtr operation = Lease({{id, ""}});
  operation->request.mask = kernels::Mask::SlidingWindow(10, 0);
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(launch->next_pages, SizeIs(2));  // rows 119 to 129
  store_->End(*launch, true);
}

TEST_F(SequencePrefetchTest, OnlyForFewQueryRows) {
  const SequenceId id = LoadTwoLayers(130);
  const OperationPtr operation = Lease({{id, ""}});
  operation->request.spans[0].query_rows = 17;
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(launch->next_pages, IsEmpty());
  store_->End(*launch, true);
}

TEST_F(SequencePrefetchTest, SharedPagesOnceAndHotOnesNever) {
  const SequenceId parent = LoadTwoLayers(128);
  const SequenceId child = Fork(parent);
  EXPECT_THAT(Decode({{parent, ""}, {child, ""}}), SizeIs(2));
  OpenWith(8 * kPageBytes, /*hot_pages=*/2);
  const SequenceId pinned = Create(2, /*pin=*/true);
  ASSERT_EQ(Append(pinned, Rows(192, 'a'), 1), absl::OkStatus());  // two pages hot, one cold
  EXPECT_THAT(Decode({{pinned, "b"}}), SizeIs(1));
  Text(pinned, 1);
  EXPECT_EQ(used(), kPageBytes);
}

TEST_F(SequencePrefetchTest, WhatIsTruncatedIsNotUsed) {
  const SequenceId id = LoadTwoLayers(130);
  Decode({{id, ""}});
  ASSERT_EQ(store_->Truncate(id, 64, {}).status(), absl::OkStatus());
  ASSERT_EQ(Append(id, Rows(64, 'b'), 1), absl::OkStatus());  // reads as well
  EXPECT_EQ(used(), kPageBytes);
}

}  // namespace
}  // namespace flashcore::server
