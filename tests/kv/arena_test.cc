#include "server/kv/arena.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

constexpr size_t kUnit = Arena::kUnitBytes;
constexpr size_t kSuperblock = 16 * kUnit;
constexpr Segment kBoth[] = {Segment::kHot, Segment::kCold};

// Nothing is mapped there: an arena that touches its memory fails.
std::byte* const kBase = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);

KvMemory Superblocks(size_t hot, size_t cold) {
  return {kBase, (hot + cold) * kSuperblock, hot * kSuperblock};
}

void* Owner(size_t number) { return kBase + number; }

// Pages until there is no room.
std::vector<PageId> Fill(Arena* arena, size_t page_bytes, Segment segment) {
  std::vector<PageId> pages;
  for (PageId page = arena->Allocate(page_bytes, segment, nullptr); page != kNoPage;
       page = arena->Allocate(page_bytes, segment, nullptr)) {
    pages.push_back(page);
  }
  return pages;
}

void UnrefAll(Arena* arena, const std::vector<PageId>& pages) {
  for (const PageId page : pages) EXPECT_TRUE(arena->Unref(page));
}

// The bytes of pages that a segment can still take.
size_t FreeBytes(Arena* arena, Segment segment, size_t page_bytes) {
  const std::vector<PageId> pages = Fill(arena, page_bytes, segment);
  UnrefAll(arena, pages);
  return pages.size() * page_bytes;
}

struct CapacityCase {
  const char* name;
  size_t bytes;
  size_t hot_bytes;
  size_t hot_superblocks;
  size_t cold_superblocks;
};

class ArenaCapacityTest : public ::testing::TestWithParam<CapacityCase> {};

TEST_P(ArenaCapacityTest, CountsWholeSuperblocks) {
  const CapacityCase& c = GetParam();
  Arena arena({kBase, c.bytes, c.hot_bytes}, kSuperblock);
  EXPECT_EQ(arena.base(), kBase);
  EXPECT_EQ(arena.max_page_bytes(), kSuperblock);
  EXPECT_EQ(arena.capacity_bytes(Segment::kHot), c.hot_superblocks * kSuperblock);
  EXPECT_EQ(arena.capacity_bytes(Segment::kCold), c.cold_superblocks * kSuperblock);
  for (const Segment segment : kBoth) {
    const size_t capacity = arena.capacity_bytes(segment);
    EXPECT_EQ(FreeBytes(&arena, segment, kUnit), capacity);
    EXPECT_EQ(Fill(&arena, kUnit, segment).size() * kUnit, capacity);
    EXPECT_EQ(arena.used_bytes(segment), capacity);
    EXPECT_EQ(FreeBytes(&arena, segment, kUnit), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ArenaCapacityTest,
    ::testing::Values(CapacityCase{"Even", 5 * kSuperblock, 2 * kSuperblock, 2, 3},
                      CapacityCase{"NoHot", 5 * kSuperblock, 0, 0, 5},
                      CapacityCase{"AllHot", 5 * kSuperblock, 5 * kSuperblock, 5, 0},
                      CapacityCase{"HotIsClamped", 5 * kSuperblock, SIZE_MAX, 5, 0},
                      CapacityCase{"HotIsRoundedDown", 5 * kSuperblock, 3 * kSuperblock - 1, 2, 3},
                      CapacityCase{"HotIsTooSmall", 2 * kSuperblock, kSuperblock - 1, 0, 2},
                      CapacityCase{"TailIsUnused", 3 * kSuperblock - 1, kSuperblock, 1, 1},
                      CapacityCase{"TooSmall", kSuperblock - 1, kSuperblock - 1, 0, 0},
                      CapacityCase{"Nothing", 0, 0, 0, 0}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(ArenaTest, APageIsWhatWasAskedFor) {
  Arena arena(Superblocks(1, 1), kSuperblock);
  const PageId page = arena.Allocate(2 * kUnit, Segment::kCold, Owner(77));
  ASSERT_NE(page, kNoPage);
  EXPECT_EQ(arena.owner(page), Owner(77));
  EXPECT_EQ(arena.refs(page), 1u);
  EXPECT_EQ(arena.page_bytes(page), 2 * kUnit);
  EXPECT_EQ(arena.segment(page), Segment::kCold);
  EXPECT_EQ(arena.place(page), 16);
  EXPECT_EQ(arena.address(page), kBase + kSuperblock);
  EXPECT_EQ(arena.used_bytes(Segment::kCold), 2 * kUnit);
  EXPECT_EQ(arena.used_bytes(Segment::kHot), 0u);
  EXPECT_EQ(arena.num_pages(), 1u);
}

TEST(ArenaTest, APageLivesUntilItsLastReference) {
  Arena arena(Superblocks(0, 1), kSuperblock);
  const PageId page = arena.Allocate(kUnit, Segment::kCold, nullptr);
  arena.AddRef(page);
  arena.AddRef(page);
  EXPECT_EQ(arena.refs(page), 3u);
  EXPECT_FALSE(arena.Unref(page));
  EXPECT_FALSE(arena.Unref(page));
  EXPECT_EQ(arena.used_bytes(Segment::kCold), kUnit);
  EXPECT_TRUE(arena.Unref(page));
  EXPECT_EQ(arena.used_bytes(Segment::kCold), 0u);
  EXPECT_EQ(arena.num_pages(), 0u);
}

// Also sizes that do not divide a superblock, and one that fills it.
TEST(ArenaTest, AnEmptyArenaTakesAnySize) {
  Arena arena(Superblocks(2, 5), kSuperblock);
  for (const size_t units : {3, 1, 16, 5, 9, 15, 2, 7, 8}) {
    for (const Segment segment : kBoth) {
      const size_t page_bytes = units * kUnit;
      const size_t pages = arena.capacity_bytes(segment) / kSuperblock * (kSuperblock / page_bytes);
      EXPECT_EQ(FreeBytes(&arena, segment, page_bytes), pages * page_bytes) << units;
      const std::vector<PageId> filled = Fill(&arena, page_bytes, segment);
      EXPECT_EQ(filled.size(), pages) << units;
      EXPECT_EQ(arena.used_bytes(segment), pages * page_bytes) << units;
      UnrefAll(&arena, filled);
    }
  }
}

TEST(ArenaTest, FreeBytesAreThoseForPagesOfTheSize) {
  Arena arena(Superblocks(1, 1), kSuperblock);
  EXPECT_EQ(arena.free_bytes(3 * kUnit), 2 * 15 * kUnit);
  arena.Allocate(kUnit, Segment::kCold, nullptr);
  EXPECT_EQ(arena.free_bytes(kUnit), 31 * kUnit);
  EXPECT_EQ(arena.free_bytes(3 * kUnit), 15 * kUnit) << "the other superblock is for small pages";
}

TEST(ArenaTest, AFullArenaRefusesAndLosesNothing) {
  Arena arena(Superblocks(1, 2), kSuperblock);
  const std::vector<PageId> pages = Fill(&arena, 4 * kUnit, Segment::kCold);
  for (const size_t units : {1, 4, 16}) {
    EXPECT_EQ(arena.Allocate(units * kUnit, Segment::kCold, nullptr), kNoPage);
    EXPECT_EQ(FreeBytes(&arena, Segment::kCold, units * kUnit), 0u);
  }
  EXPECT_EQ(arena.num_pages(), 8u);
  EXPECT_EQ(FreeBytes(&arena, Segment::kHot, kUnit), kSuperblock) << "each segment on its own";

  const int32_t place = arena.place(pages[3]);
  EXPECT_TRUE(arena.Unref(pages[3]));
  EXPECT_EQ(arena.Allocate(kUnit, Segment::kCold, nullptr), kNoPage)
      << "the superblock serves 4 units";
  const PageId again = arena.Allocate(4 * kUnit, Segment::kCold, nullptr);
  ASSERT_NE(again, kNoPage);
  EXPECT_EQ(arena.place(again), place);
}

TEST(ArenaTest, AnEmptySuperblockServesAnotherSizeAtOnce) {
  Arena arena(Superblocks(0, 3), kSuperblock);
  const std::vector<PageId> pages = Fill(&arena, 8 * kUnit, Segment::kCold);
  EXPECT_TRUE(arena.Unref(pages[2]));
  EXPECT_EQ(FreeBytes(&arena, Segment::kCold, 3 * kUnit), 0u);
  EXPECT_TRUE(arena.Unref(pages[3]));
  EXPECT_EQ(FreeBytes(&arena, Segment::kCold, 3 * kUnit), 15 * kUnit);
  EXPECT_EQ(Fill(&arena, 3 * kUnit, Segment::kCold).size(), 5u);
}

// So that superblocks with few pages can become empty.
TEST(ArenaTest, FillsTheSuperblockThatWasFullLast) {
  Arena arena(Superblocks(0, 3), kSuperblock);
  const std::vector<PageId> pages = Fill(&arena, 4 * kUnit, Segment::kCold);
  for (const size_t page : {0, 1, 2, 8}) EXPECT_TRUE(arena.Unref(pages[page]));
  EXPECT_EQ(arena.place(arena.Allocate(4 * kUnit, Segment::kCold, nullptr)), 32);
  EXPECT_TRUE(arena.Unref(pages[3]));
  EXPECT_EQ(FreeBytes(&arena, Segment::kCold, kSuperblock), kSuperblock);
}

TEST(ArenaTest, SwapPlacesMovesPagesBetweenSegments) {
  Arena arena(Superblocks(1, 1), kSuperblock);
  const PageId a = arena.Allocate(2 * kUnit, Segment::kHot, Owner(1));
  const PageId b = arena.Allocate(2 * kUnit, Segment::kCold, Owner(2));
  const int32_t hot = arena.place(a), cold = arena.place(b);
  arena.AddRef(b);
  arena.SwapPlaces(a, b);
  EXPECT_EQ(arena.place(a), cold);
  EXPECT_EQ(arena.place(b), hot);
  EXPECT_EQ(arena.segment(a), Segment::kCold);
  EXPECT_EQ(arena.segment(b), Segment::kHot);
  EXPECT_EQ(arena.owner(a), Owner(1));
  EXPECT_EQ(arena.owner(b), Owner(2));
  EXPECT_EQ(arena.refs(b), 2u);
  for (const Segment segment : kBoth) EXPECT_EQ(arena.used_bytes(segment), 2 * kUnit);

  // Unref frees the place where the page is now, not where it was allocated.
  EXPECT_TRUE(arena.Unref(a));
  EXPECT_EQ(arena.used_bytes(Segment::kCold), 0u);
  EXPECT_EQ(arena.used_bytes(Segment::kHot), 2 * kUnit);
  EXPECT_EQ(FreeBytes(&arena, Segment::kCold, kSuperblock), kSuperblock);
  EXPECT_EQ(FreeBytes(&arena, Segment::kHot, kSuperblock), 0u);
  arena.SwapPlaces(b, b);
  EXPECT_EQ(arena.place(b), hot);
}

TEST(ArenaTest, ChurnNeedsNoMoreIds) {
  Arena arena(Superblocks(0, 8), kSuperblock);
  const size_t pages = arena.capacity_bytes(Segment::kCold) / kUnit;
  for (int round = 0; round < 1000; ++round) {
    const size_t page_bytes = (1 + round % 16) * kUnit;
    const std::vector<PageId> filled = Fill(&arena, page_bytes, Segment::kCold);
    for (const PageId page : filled) ASSERT_LT(page, pages);
    UnrefAll(&arena, filled);
  }
}

// Random use, compared with a map of the places in use.
class ArenaModelTest : public ::testing::Test {
 protected:
  static constexpr size_t kHot = 6;
  static constexpr size_t kCold = 26;

  struct ModelPage {
    int32_t place;
    size_t page_bytes;
    uint32_t refs;
    void* owner;
  };

  int32_t Units(const ModelPage& page) const {
    return static_cast<int32_t>(page.page_bytes / kUnit);
  }
  Segment SegmentOf(int32_t place) const {
    return place < static_cast<int32_t>(kHot * 16) ? Segment::kHot : Segment::kCold;
  }
  PageId RandomPage() { return std::next(model_.begin(), random_() % model_.size())->first; }

  // True if it succeeded.
  bool Allocate(size_t page_bytes, Segment segment) {
    void* const owner = Owner(random_());
    const bool expected = ModelFreeBytes(segment, page_bytes) > 0;
    const PageId id = arena_.Allocate(page_bytes, segment, owner);
    EXPECT_EQ(id != kNoPage, expected);
    if (id == kNoPage) return false;
    const ModelPage page{arena_.place(id), page_bytes, 1, owner};
    EXPECT_LT(id, (kHot + kCold) * 16) << "an id for each slot is enough";
    EXPECT_EQ(SegmentOf(page.place), segment);
    EXPECT_EQ(SegmentOf(page.place + Units(page) - 1), segment);
    EXPECT_TRUE(model_.emplace(id, page).second) << "the id is taken";
    ExpectFree(page);
    taken_[page.place] = page.place + Units(page);
    used_[SegmentOf(page.place)] += page_bytes;
    return true;
  }

  // The bytes of pages that `segment` can still take: in empty superblocks, and in those that serve
  // this size.
  size_t ModelFreeBytes(Segment segment, size_t page_bytes) const {
    constexpr size_t kSuperblocks = kHot + kCold;
    size_t pages[kSuperblocks] = {}, sizes[kSuperblocks] = {};
    for (const auto& [id, page] : model_) {
      ++pages[page.place / 16];
      sizes[page.place / 16] = page.page_bytes;
    }
    size_t bytes = 0;
    const bool hot = segment == Segment::kHot;
    for (size_t i = hot ? 0 : kHot; i < (hot ? kHot : kSuperblocks); ++i) {
      if (pages[i] > 0 && sizes[i] != page_bytes) continue;
      bytes += (kSuperblock / page_bytes - pages[i]) * page_bytes;
    }
    return bytes;
  }

  // `page` is inside the arena and overlaps no other page.
  void ExpectFree(const ModelPage& page) {
    EXPECT_GE(page.place, 0);
    EXPECT_LE(page.place + Units(page), static_cast<int32_t>((kHot + kCold) * 16));
    const auto next = taken_.lower_bound(page.place);
    if (next != taken_.end()) {
      EXPECT_LE(page.place + Units(page), next->first);
    }
    if (next != taken_.begin()) {
      EXPECT_LE(std::prev(next)->second, page.place);
    }
  }

  void Unref(PageId id) {
    ModelPage& page = model_.at(id);
    const bool last = --page.refs == 0;
    EXPECT_EQ(arena_.Unref(id), last);
    if (!last) return;
    taken_.erase(page.place);
    used_[SegmentOf(page.place)] -= page.page_bytes;
    model_.erase(id);
  }

  void SwapPlaces(PageId a, PageId b) {
    if (model_.at(a).page_bytes != model_.at(b).page_bytes) return;
    arena_.SwapPlaces(a, b);
    std::swap(model_.at(a).place, model_.at(b).place);
  }

  // `pressure` of 100 steps allocate.
  void Step(unsigned pressure) {
    if (model_.empty() || random_() % 100 < pressure) {
      Allocate(kPageUnits[random_() % std::size(kPageUnits)] * kUnit, kBoth[random_() % 2]);
      return;
    }
    const PageId page = RandomPage();
    switch (random_() % 4) {
      case 0:
        arena_.AddRef(page);
        ++model_.at(page).refs;
        break;
      case 1:
        SwapPlaces(page, RandomPage());
        break;
      default:
        Unref(page);
    }
  }

  void ExpectAgreement() {
    EXPECT_EQ(arena_.num_pages(), model_.size());
    for (const Segment segment : kBoth) EXPECT_EQ(arena_.used_bytes(segment), used_[segment]);
    for (const auto& [id, page] : model_) {
      EXPECT_EQ(arena_.place(id), page.place);
      EXPECT_EQ(arena_.page_bytes(id), page.page_bytes);
      EXPECT_EQ(arena_.refs(id), page.refs);
      EXPECT_EQ(arena_.owner(id), page.owner);
      EXPECT_EQ(arena_.segment(id), SegmentOf(page.place));
    }
  }

  // All free bytes can be allocated.
  void ExpectFreeBytesAreFree(size_t page_bytes, Segment segment) {
    const size_t free = ModelFreeBytes(segment, page_bytes);
    const std::vector<PageId> filled = Fill(&arena_, page_bytes, segment);
    EXPECT_EQ(filled.size() * page_bytes, free);
    for (const PageId page : filled) {
      EXPECT_FALSE(model_.count(page));
      ExpectFree({arena_.place(page), page_bytes, 1, nullptr});
    }
    UnrefAll(&arena_, filled);
    EXPECT_EQ(FreeBytes(&arena_, segment, page_bytes), free);
  }

  static constexpr size_t kPageUnits[] = {1, 2, 3, 5, 8, 16};

  // Only free memory is given back.
  KvMemory Memory() {
    KvMemory memory = Superblocks(kHot, kCold);
    memory.give_back = [this](std::byte* data, size_t bytes) {
      ExpectFree({static_cast<int32_t>((data - kBase) / kUnit), bytes, 1, nullptr});
      ++given_back_;
    };
    return memory;
  }

  Arena arena_{Memory(), kSuperblock};
  int given_back_ = 0;
  std::mt19937 random_;
  std::map<PageId, ModelPage> model_;
  std::map<int32_t, int32_t> taken_;  // [first, second) in units
  std::map<Segment, size_t> used_;
};

// An arena of a device that takes memory back, and what it was given.
class ArenaGiveBackTest : public ::testing::Test {
 protected:
  using Seconds = std::chrono::seconds;

  KvMemory Memory(size_t hot, size_t cold) {
    KvMemory memory = Superblocks(hot, cold);
    memory.give_back = [this](std::byte* data, size_t bytes) {
      EXPECT_EQ(bytes, kSuperblock);
      given_back_.push_back((data - kBase) / kSuperblock);
    };
    return memory;
  }

  // The superblocks that it gives back at this time, in order.
  std::vector<size_t> GiveBackAt(Seconds time) {
    given_back_.clear();
    while (arena_.GiveBackUnneeded(TimePoint(time))) {
    }
    return std::exchange(given_back_, {});
  }

  std::vector<size_t> given_back_;
  Arena arena_{Memory(1, 3), kSuperblock};
};

TEST_F(ArenaGiveBackTest, MemoryIsGivenBackOnceWhenItHasBeenEmptyForLong) {
  EXPECT_TRUE(GiveBackAt(Seconds(100)).empty()) << "never used";
  std::vector<PageId> pages = Fill(&arena_, kSuperblock, Segment::kCold);
  pages.push_back(Fill(&arena_, kSuperblock, Segment::kHot)[0]);
  EXPECT_TRUE(GiveBackAt(Seconds(200)).empty()) << "in use";
  UnrefAll(&arena_, {pages[0], pages[3]});
  EXPECT_TRUE(GiveBackAt(Seconds(204)).empty());
  UnrefAll(&arena_, {pages[1]});
  EXPECT_EQ(GiveBackAt(Seconds(205)), (std::vector<size_t>{0, 1}));
  EXPECT_TRUE(GiveBackAt(Seconds(208)).empty());
  EXPECT_EQ(GiveBackAt(Seconds(209)), (std::vector<size_t>{2}));
  EXPECT_TRUE(GiveBackAt(Seconds(900)).empty()) << "once";
  UnrefAll(&arena_, {pages[2]});
  EXPECT_EQ(Fill(&arena_, kSuperblock, Segment::kCold).size(), 3u) << "what was given back is free";
}

TEST_F(ArenaGiveBackTest, MemoryThatIsUsedAgainStays) {
  GiveBackAt(Seconds(100));
  std::vector<PageId> pages = Fill(&arena_, kSuperblock, Segment::kCold);
  UnrefAll(&arena_, pages);
  GiveBackAt(Seconds(104));
  const PageId again = arena_.Allocate(kUnit, Segment::kCold, nullptr);
  EXPECT_EQ(arena_.place(again), static_cast<int32_t>(3 * kSuperblock / kUnit))
      << "the last that was emptied";
  EXPECT_EQ(GiveBackAt(Seconds(105)), (std::vector<size_t>{1, 2}));
  UnrefAll(&arena_, {again});
  EXPECT_TRUE(GiveBackAt(Seconds(109)).empty());
  EXPECT_EQ(GiveBackAt(Seconds(110)), (std::vector<size_t>{3}));
}

TEST_F(ArenaGiveBackTest, ADeviceThatKeepsItsMemoryIsNotAsked) {
  Arena arena(Superblocks(0, 1), kSuperblock);
  UnrefAll(&arena, Fill(&arena, kSuperblock, Segment::kCold));
  EXPECT_FALSE(arena.GiveBackUnneeded(TimePoint(Seconds(100))));
}

TEST_F(ArenaModelTest, AgreesUnderRandomUse) {
  random_.seed(TestSeed());
  for (int step = 0; step < 20'000 && !HasFailure(); ++step) {
    Step(step / 1000 % 2 == 0 ? 70 : 15);  // fills up, drains, and again
    arena_.GiveBackUnneeded(TimePoint(std::chrono::milliseconds(100 * step)));
    if (step % 100 != 0) continue;
    ExpectAgreement();
    ExpectFreeBytesAreFree(kPageUnits[random_() % std::size(kPageUnits)] * kUnit,
                           kBoth[random_() % 2]);
  }
  EXPECT_GT(given_back_, 0);
  while (!model_.empty()) Unref(model_.begin()->first);
  ExpectAgreement();
  for (const Segment segment : kBoth) {
    EXPECT_EQ(FreeBytes(&arena_, segment, kSuperblock), arena_.capacity_bytes(segment));
  }
}

}  // namespace
}  // namespace flashcore::server
