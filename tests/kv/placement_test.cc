#include "server/kv/placement.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/test_seed.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

// Each byte is read `reads` times per second.
PlacementCandidate Sequence(size_t bytes, size_t hot_bytes, double reads) {
  return {bytes, hot_bytes, false, reads * static_cast<double>(bytes)};
}

PlacementCandidate Pinned(size_t bytes, size_t hot_bytes = 0, double reads = 0) {
  PlacementCandidate candidate = Sequence(bytes, hot_bytes, reads);
  candidate.pinned = true;
  return candidate;
}

struct PlacementCase {
  const char* name;
  size_t capacity_bytes;
  std::vector<PlacementCandidate> candidates;
  std::vector<size_t> chosen;
};

class ChooseHotBytesTest : public ::testing::TestWithParam<PlacementCase> {};

// With a hysteresis of 2 and at least 0.1 reads per second.
TEST_P(ChooseHotBytesTest, Chooses) {
  PlacementOptions options;
  options.capacity_bytes = GetParam().capacity_bytes;
  std::vector<PlacementCandidate> candidates = GetParam().candidates;
  EXPECT_THAT(ChooseHotBytes(candidates, options), ElementsAreArray(GetParam().chosen));

  for (size_t i = 0; i < candidates.size(); ++i) candidates[i].hot_bytes = GetParam().chosen[i];
  EXPECT_THAT(ChooseHotBytes(candidates, options), ElementsAreArray(GetParam().chosen)) << "again";
}

const PlacementCase kCases[] = {
    {"Nobody", 100, {}, {}},
    {"NoCapacity", 0, {Pinned(10), Sequence(10, 10, 5)}, {0, 0}},
    {"EmptySequences", 100, {Sequence(0, 0, 0), Pinned(0), {0, 0, false, 5}}, {0, 0, 0}},

    {"PromotesWhatIsRead", 100, {Sequence(30, 0, 1), Sequence(40, 0, 2)}, {30, 40}},
    {"NotWhatIsReadTooSeldom", 100, {Sequence(30, 0, 0.09), Sequence(40, 0, 0.11)}, {0, 40}},
    {"CountsReadsOfEachByte", 10, {{100, 0, false, 150}, {10, 0, false, 100}}, {0, 10}},
    {"TheLastInPart",
     100,
     {Sequence(80, 0, 1), Sequence(70, 0, 3), Sequence(9, 0, 2)},
     {21, 70, 9}},
    {"AtMostTheCapacity", 100, {Sequence(500, 0, 1), Sequence(500, 0, 0.9)}, {100, 0}},
    {"OfEqualsTheFirst", 50, {Sequence(40, 0, 1), Sequence(40, 0, 1)}, {40, 10}},
    {"OfEqualsTheHotOne", 40, {Sequence(40, 0, 1), Sequence(40, 40, 1)}, {0, 40}},
    {"CompletesWhatIsHotInPart", 100, {Sequence(90, 20, 1)}, {90}},
    {"MoreHotThanItHas", 100, {Sequence(30, 60, 1)}, {30}},

    {"HotStaysUnread", 100, {Sequence(60, 60, 0), Sequence(40, 0, 1)}, {60, 40}},
    {"HotInPartStaysSo", 100, {Sequence(60, 20, 0)}, {20}},
    {"UnreadGivesWay", 100, {Sequence(60, 60, 0), Sequence(80, 0, 0.2)}, {20, 80}},
    {"NotToWhatIsReadTooSeldom", 100, {Sequence(60, 60, 0), Sequence(80, 0, 0.09)}, {60, 0}},
    {"TheColdestGivesWayFirst",
     100,
     {Sequence(50, 50, 0.2), Sequence(50, 50, 0.1), Sequence(30, 0, 9)},
     {50, 20, 30}},
    {"TooMuchIsHot", 60, {Sequence(50, 50, 0.2), Sequence(50, 50, 0.3)}, {10, 50}},

    {"AsOftenDoesNotDisplace", 50, {Sequence(50, 50, 1), Sequence(50, 0, 1.9)}, {50, 0}},
    {"TwiceAsOftenDoesNot", 50, {Sequence(50, 0, 2), Sequence(50, 50, 1)}, {0, 50}},
    {"MoreOftenDoes", 50, {Sequence(50, 50, 1), Sequence(50, 0, 2.1)}, {0, 50}},
    {"OnlyWhatIsNeeded", 50, {Sequence(50, 50, 1), Sequence(20, 0, 2.1)}, {30, 20}},
    {"HotInPartKeepsItsPart", 50, {Sequence(50, 20, 1), Sequence(50, 30, 1.9)}, {20, 30}},

    {"PinnedUnread", 100, {Sequence(60, 60, 9), Pinned(70)}, {30, 70}},
    {"PinnedInTheirOrder", 100, {Pinned(70), Pinned(60, 60, 9), Sequence(50, 50, 9)}, {70, 30, 0}},
    {"PinnedThatDoesNotFit", 100, {Pinned(250)}, {100}},
    {"PinnedLaterGivesWay", 10, {Pinned(10), Pinned(10, 10)}, {10, 0}},
};

INSTANTIATE_TEST_SUITE_P(All, ChooseHotBytesTest, ::testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(PlacementTest, OptionsCount) {
  const std::vector<PlacementCandidate> candidates = {Sequence(50, 50, 1), Sequence(50, 0, 1.1)};
  EXPECT_THAT(ChooseHotBytes(candidates, {50, /*hysteresis=*/1, 0.1}), ElementsAre(0, 50));
  EXPECT_THAT(ChooseHotBytes(candidates, {50, /*hysteresis=*/1.2, 0.1}), ElementsAre(50, 0));
  EXPECT_THAT(ChooseHotBytes(candidates, {100, 2, /*min_reads_per_second=*/1.1}),
              ElementsAre(50, 50));
  EXPECT_THAT(ChooseHotBytes(candidates, {100, 2, /*min_reads_per_second=*/1.2}),
              ElementsAre(50, 0));
  EXPECT_THAT(ChooseHotBytes({}, {}), IsEmpty());
}

TEST(PlacementTest, ManyEqualsGoInTheirOrder) {
  PlacementOptions options;
  options.capacity_bytes = 500;
  std::vector<size_t> expected(50, 10);
  expected.resize(100);
  EXPECT_EQ(ChooseHotBytes(std::vector<PlacementCandidate>(100, Sequence(10, 0, 1)), options),
            expected);
}

// Few distinct values, so that there are ties. Hot bytes may exceed the capacity.
std::vector<PlacementCandidate> RandomCandidates(std::mt19937* random) {
  std::vector<PlacementCandidate> candidates((*random)() % 12);
  for (PlacementCandidate& candidate : candidates) {
    candidate = Sequence((*random)() % 6 * 10, (*random)() % 70, 0.1 * ((*random)() % 8));
    candidate.pinned = (*random)() % 5 == 0;
  }
  return candidates;
}

class PlacementPropertyTest : public ::testing::Test {
 protected:
  // No candidate that wants more room is worth more than one that got room.
  void ExpectFair(const std::vector<PlacementCandidate>& candidates,
                  const std::vector<size_t>& chosen, const PlacementOptions& options) {
    for (size_t loser = 0; loser < candidates.size(); ++loser) {
      const PlacementCandidate& a = candidates[loser];
      const double reads = a.bytes_read_per_second / static_cast<double>(a.bytes);
      const bool was_hot = chosen[loser] < a.hot_bytes;
      const bool wants = was_hot || reads >= options.min_reads_per_second;
      if (a.pinned || chosen[loser] == a.bytes || !wants) continue;
      EXPECT_EQ(std::accumulate(chosen.begin(), chosen.end(), size_t{0}), options.capacity_bytes);
      for (size_t winner = 0; winner < candidates.size(); ++winner) {
        const PlacementCandidate& b = candidates[winner];
        if (b.pinned || chosen[winner] == 0) continue;
        const bool is_new = chosen[winner] > b.hot_bytes;
        const double worth = b.bytes_read_per_second / static_cast<double>(b.bytes);
        EXPECT_LE(reads * (was_hot ? options.hysteresis : 1),
                  worth * (is_new ? 1 : options.hysteresis));
      }
    }
  }

  void ExpectPinnedFirst(const std::vector<PlacementCandidate>& candidates,
                         const std::vector<size_t>& chosen, size_t room) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!candidates[i].pinned) continue;
      EXPECT_EQ(chosen[i], std::min(candidates[i].bytes, room));
      room -= chosen[i];
    }
  }
};

TEST_F(PlacementPropertyTest, HoldsForRandomCandidates) {
  std::mt19937 random(TestSeed());
  for (int round = 0; round < 20'000 && !HasFailure(); ++round) {
    PlacementOptions options;
    options.capacity_bytes = random() % 250;
    options.hysteresis = 1 + 0.5 * (random() % 4);
    std::vector<PlacementCandidate> candidates = RandomCandidates(&random);
    const std::vector<size_t> chosen = ChooseHotBytes(candidates, options);
    ASSERT_EQ(chosen.size(), candidates.size());
    EXPECT_LE(std::accumulate(chosen.begin(), chosen.end(), size_t{0}), options.capacity_bytes);
    for (size_t i = 0; i < chosen.size(); ++i) EXPECT_LE(chosen[i], candidates[i].bytes);
    ExpectPinnedFirst(candidates, chosen, options.capacity_bytes);
    ExpectFair(candidates, chosen, options);

    for (size_t i = 0; i < chosen.size(); ++i) candidates[i].hot_bytes = chosen[i];
    EXPECT_EQ(ChooseHotBytes(candidates, options), chosen) << "it goes on moving K/V";
  }
}

// The store moves whole pages: it rounds the answer down to pages, and that must be stable too.
TEST(PlacementTest, IsStableWhenPagesAreRoundedDown) {
  constexpr size_t kPage = 16;
  PlacementOptions options;
  options.capacity_bytes = 100;
  std::vector<PlacementCandidate> candidates = {Sequence(64, 0, 3), Sequence(64, 0, 2),
                                                Sequence(64, 64, 0.2)};
  const auto settle = [&] {
    std::vector<size_t> chosen = ChooseHotBytes(candidates, options);
    for (size_t i = 0; i < chosen.size(); ++i) {
      candidates[i].hot_bytes = chosen[i] -= chosen[i] % kPage;
    }
    return chosen;
  };
  const std::vector<size_t> first = settle();
  EXPECT_THAT(first, ElementsAre(64, 32, 0));
  EXPECT_EQ(settle(), first);
}

}  // namespace
}  // namespace flashcore::server
