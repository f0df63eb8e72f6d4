// PageMover, through the SequenceStore: pages move while launches read and append.
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::IsEmpty;
using ::testing::Lt;
using testing::OperationPtr;
using testing::Rows;
using testing::SequenceStoreTest;
using ::testing::SizeIs;

// With a hot segment of four pages.
class SequenceMovesTest : public SequenceStoreTest {
 protected:
  SequenceMovesTest() { Open({}, /*pages=*/32, /*hot_pages=*/4); }

  // A pinned fork: its pages should be hot, and are not yet.
  SequenceId Pin(SequenceId id) { return store_->Fork(id, {}, {/*pin=*/true}, {"alice", {}})->id; }
};

TEST_F(SequenceMovesTest, WithoutAHotSegmentNothingMoves) {
  Open();
  Pin(Load(Rows(640, 'a')));
  EXPECT_THAT(BeginMoves().pages, IsEmpty());
}

TEST_F(SequenceMovesTest, NewPagesOfAPinnedSequenceAreHotAsLongAsThereIsRoom) {
  EXPECT_EQ(HotPages(Load(Rows(128, 'a'))), 0u);
  EXPECT_EQ(HotPages(Load(Rows(5 * 64, 'b'), /*pin=*/true)), 4u);
}

TEST_F(SequenceMovesTest, FullPagesThatAPinnedSequenceSharesBecomeHot) {
  const SequenceId cold = Load(Rows(128, 'a') + "tail");
  const SequenceId pinned = Pin(cold);
  EXPECT_EQ(HotPages(pinned), 0u);
  MovePages();
  EXPECT_EQ(HotPages(pinned), 2u);
  EXPECT_EQ(HotPages(cold), 2u);
  EXPECT_EQ(Text(pinned), Rows(128, 'a') + "tail");
  EXPECT_EQ(Text(cold), Rows(128, 'a') + "tail");
  EXPECT_EQ(Pages(), 3u);
  EXPECT_EQ(metrics_.kv_promoted_bytes.Value(), 2 * kPageBytes);
  EXPECT_THAT(BeginMoves().pages, IsEmpty());
}

TEST_F(SequenceMovesTest, LaunchesListTheNewPlacesOfPagesThatMoved) {
  const SequenceId cold = Load(Rows(128, 'a') + "tail");
  const SequenceId pinned = Pin(cold);
  const auto places = [&](SequenceId id) {
    const OperationPtr operation = Lease({{id, ""}});
    const auto launch = Begin({operation.get()});
    store_->EndLaunch(*launch, true);
    return launch->pages;
  };
  const std::vector<int32_t> before = places(cold);
  EXPECT_EQ(places(pinned), before);
  constexpr int32_t kFirstCold = 4 * kPageBytes / Arena::kUnitBytes;
  EXPECT_THAT(before, Each(Ge(kFirstCold)));
  MovePages();
  for (const SequenceId id : {cold, pinned}) {
    EXPECT_THAT(places(id), ElementsAre(Lt(kFirstCold), Lt(kFirstCold), before[2]));
  }
}

TEST_F(SequenceMovesTest, APinnedSequenceDisplacesOneThatIsNot) {
  const SequenceId was_pinned = Load(Rows(4 * 64, 'a'), /*pin=*/true);
  const SequenceId displaced = Fork(was_pinned);
  ASSERT_EQ(store_->Delete(was_pinned, {"alice", {}}), absl::OkStatus());
  const SequenceId pinned = Pin(Load(Rows(3 * 64, 'b')));
  MovePages();  // makes room
  MovePages();
  EXPECT_EQ(HotPages(pinned), 3u);
  EXPECT_EQ(HotPages(displaced), 1u);
  EXPECT_EQ(Text(pinned), Rows(3 * 64, 'b'));
  EXPECT_EQ(Text(displaced), Rows(4 * 64, 'a'));
  EXPECT_EQ(metrics_.kv_demoted_bytes.Value(), 3 * kPageBytes);
}

// Promotion needs room that only demotion makes, so demotion comes first when the bytes are
// limited.
TEST_F(SequenceMovesTest, MakesRoomBeforeItPromotes) {
  const SequenceId was_pinned = Load(Rows(3 * 64, 'a'), /*pin=*/true);  // one hot page is free
  const SequenceId displaced = Fork(was_pinned);
  ASSERT_EQ(store_->Delete(was_pinned, {"alice", {}}), absl::OkStatus());
  const SequenceId pinned = Pin(Load(Rows(4 * 64, 'b')));
  store_->EndMoves(BeginMoves(2 * kPageBytes), true);
  EXPECT_EQ(metrics_.kv_demoted_bytes.Value(), 2 * kPageBytes);
  EXPECT_EQ(metrics_.kv_promoted_bytes.Value(), 0u);
  EXPECT_EQ(HotPages(displaced), 1u);
  store_->EndMoves(BeginMoves(4 * kPageBytes), true);  // the rest of the room, and three of four
  EXPECT_EQ(HotPages(displaced), 0u);
  EXPECT_EQ(HotPages(pinned), 3u);
  MovePages();
  EXPECT_EQ(HotPages(pinned), 4u);
  EXPECT_EQ(Text(pinned), Rows(4 * 64, 'b'));
  EXPECT_EQ(Text(displaced), Rows(3 * 64, 'a'));
}

TEST_F(SequenceMovesTest, MovesNoMoreBytesAtATimeThanItIsTold) {
  const SequenceId pinned = Pin(Load(Rows(4 * 64, 'a')));
  const PageMoves moves = BeginMoves(2 * kPageBytes + 1);
  EXPECT_THAT(moves.pages, SizeIs(2));
  store_->EndMoves(moves, true);
  EXPECT_EQ(HotPages(pinned), 2u);
}

TEST_F(SequenceMovesTest, HotPagesThatAreGoneLeaveAQuarterOnce) {
  const SequenceId first = Load(Rows(64, 'a'), /*pin=*/true);
  const SequenceId second = Load(Rows(3 * 64, 'b'), /*pin=*/true);
  EXPECT_FALSE(store_->ShouldResetPersistingL2());
  ASSERT_EQ(store_->Delete(first, {"alice", {}}), absl::OkStatus());
  EXPECT_TRUE(store_->ShouldResetPersistingL2());
  EXPECT_FALSE(store_->ShouldResetPersistingL2());
  EXPECT_EQ(HotPages(second), 3u);
}

TEST_F(SequenceMovesTest, AHotPlaceThatIsTakenAgainIsNotLeft) {
  const SequenceId first = Load(Rows(64, 'a'), /*pin=*/true);
  Load(Rows(3 * 64, 'b'), /*pin=*/true);
  ASSERT_EQ(store_->Delete(first, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(HotPages(Load(Rows(64, 'c'), /*pin=*/true)), 1u);
  EXPECT_FALSE(store_->ShouldResetPersistingL2());
}

TEST_F(SequenceMovesTest, ColdPagesThatAreGoneLeaveNothing) {
  ASSERT_EQ(store_->Delete(Load(Rows(4 * 64, 'a')), {"alice", {}}), absl::OkStatus());
  EXPECT_FALSE(store_->ShouldResetPersistingL2());
}

TEST_F(SequenceMovesTest, AMoveThatFailsChangesNothing) {
  const SequenceId pinned = Pin(Load(Rows(128, 'a')));
  const PageMoves moves = store_->BeginMoves(~size_t{0});  // nobody copies
  EXPECT_EQ(Pages(), 4u);
  store_->EndMoves(moves, false);
  EXPECT_EQ(Pages(), 2u);
  EXPECT_EQ(HotPages(pinned), 0u);
  EXPECT_EQ(Text(pinned), Rows(128, 'a'));
}

TEST_F(SequenceMovesTest, ARunningLaunchKeepsTheOldPlace) {
  const SequenceId pinned = Pin(Load(Rows(64, 'a')));
  const OperationPtr operation = Lease({{pinned, ""}});
  const auto launch = Begin({operation.get()});
  MovePages();
  EXPECT_EQ(HotPages(pinned), 1u);
  EXPECT_EQ(Pages(), 2u) << "the old place is free too early";
  Load(Rows(640, 'z'));
  EXPECT_EQ(Text(*launch), Rows(64, 'a'));
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Pages(), 11u);
  EXPECT_EQ(Text(pinned), Rows(64, 'a'));
}

TEST_F(SequenceMovesTest, APageThatMovesIsCopiedAndNotWritten) {
  const SequenceId source = Load(Rows(64, 'a'));
  const SequenceId pinned = Pin(source);
  ASSERT_EQ(store_->Delete(source, {"alice", {}}), absl::OkStatus());
  const PageMoves moves = BeginMoves();
  ASSERT_TRUE(store_->Truncate(pinned, 60, {}, {"alice", {}}).ok());
  const OperationPtr operation = Lease({{pinned, "bbbb"}});
  const auto launch = Begin({operation.get()});
  EXPECT_THAT(launch->copies, SizeIs(1));
  store_->EndMoves(moves, true);
  store_->EndLaunch(*launch, true);
  EXPECT_EQ(Text(pinned), Rows(60, 'a') + "bbbb");
  EXPECT_EQ(Pages(), 1u);
}

TEST_F(SequenceMovesTest, WhatIsDeletedWhileItMovesIsFreeAfterwards) {
  const SequenceId source = Load(Rows(64, 'a'));
  const SequenceId pinned = Pin(source);
  const PageMoves moves = BeginMoves();
  ASSERT_EQ(store_->Delete(source, {"alice", {}}), absl::OkStatus());
  ASSERT_EQ(store_->Delete(pinned, {"alice", {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 2u);
  store_->EndMoves(moves, true);
  EXPECT_EQ(Pages(), 0u);
}

// Otherwise a page could move twice at a time, and the second copy would read a place that the
// first has given up.
TEST_F(SequenceMovesTest, NothingElseMovesUntilTheMovesHaveEnded) {
  const SequenceId pinned = Pin(Load(Rows(128, 'a')));
  const PageMoves moves = BeginMoves(kPageBytes);
  EXPECT_THAT(BeginMoves().pages, IsEmpty());
  store_->EndMoves(moves, true);
  MovePages();
  EXPECT_EQ(HotPages(pinned), 2u);
}

}  // namespace
}  // namespace flashcore::server
