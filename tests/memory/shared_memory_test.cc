#include "server/memory/shared_memory.h"

#include <signal.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/memory/block_allocator.h"
#include "server/memory/regions.h"
#include "server/request/request.h"
#include "server/request/tensors.h"
#include "server/request/validate.h"
#include "tests/base/has_info.h"
#include "tests/engine/fakes.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using testing::HasInfo;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Memfd;
using ::testing::UnorderedElementsAre;

constexpr size_t kPage = 4096;

// Called with the address before memory is unmapped by code of this program. The tests set it while
// no other thread unmaps.
std::function<void(void*)> before_munmap;

TEST(SharedRegionTest, IsTheClientsMemory) {
  const Memfd memory(3 * kPage);
  const auto region = memory.Map();
  memory.data()[2 * kPage] = std::byte{7};
  EXPECT_EQ(region->data()[2 * kPage], std::byte{7});
  region->data()[5] = std::byte{9};
  EXPECT_EQ(memory.data()[5], std::byte{9});
  EXPECT_EQ(region->Check(), absl::OkStatus());
}

// Several threads touch it at a time, beside memory that stays whole.
TEST(FaultGuardTest, TouchingWhatIsGoneLeavesTheProcessAliveAndTheRangeUseless) {
  constexpr size_t kPages = 64;
  const Memfd other(kPage);
  const auto kept = FaultGuard::Make(other.data(), kPage);
  other.data()[0] = std::byte{1};
  for (const bool writes : {false, true}) {
    Memfd memory(kPages * kPage, Memfd::Kind::kUnsealed);
    std::memset(memory.data(), 5, kPages * kPage);
    const auto guard = FaultGuard::Make(memory.data(), kPages * kPage);
    memory.Resize(kPage);
    EXPECT_FALSE(guard->lost());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        int sum = 0;
        for (size_t page = i; page < kPages; page += 4) {
          volatile std::byte* const byte = memory.data() + page * kPage;
          if (writes) *byte = std::byte{3};
          sum += static_cast<int>(*byte);
        }
        EXPECT_GE(sum, 0);
      });
    }
    for (std::thread& thread : threads) thread.join();
    memory.Resize(kPages * kPage);  // too late
    EXPECT_TRUE(guard->lost());
  }
  EXPECT_FALSE(kept->lost());
  EXPECT_EQ(other.data()[0], std::byte{1});
}

TEST(FaultGuardDeathTest, OtherFaultsEndTheProcessAsBefore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fault = [] {
    signal(SIGBUS, SIG_DFL);  // a sanitizer's handler would only report
    const Memfd guarded(kPage);
    const auto guard = FaultGuard::Make(guarded.data(), kPage);
    Memfd memory(kPage, Memfd::Kind::kUnsealed);
    memory.Resize(0);
    *const_cast<volatile std::byte*>(memory.data()) = std::byte{1};
  };
  EXPECT_EXIT(fault(), ::testing::KilledBySignal(SIGBUS), "");
}

TEST(SharedRegionTest, IsGuardedNoLongerWhenItsAddressesBecomeFree) {
  const Memfd memory(kPage);
  auto region = memory.Map();
  std::byte* const data = region->data();
  // The region's guard is the last one that there is.
  std::vector<FaultGuard> guards;
  while (auto guard = FaultGuard::Make(data, kPage)) guards.push_back(*std::move(guard));
  int unmapped = 0;
  before_munmap = [&](void* address) {
    if (address != data) return;
    ++unmapped;
    // Whoever maps memory here next needs a guard, and must not share the range of an old one.
    EXPECT_TRUE(FaultGuard::Make(data, kPage).has_value()) << "the old guard is still there";
  };
  region.reset();
  before_munmap = nullptr;
  EXPECT_EQ(unmapped, 1);
}

TEST(FaultGuardTest, ThereAreSoManyAndNoMore) {
  std::vector<std::byte> memory(kPage);
  std::vector<FaultGuard> guards;
  for (size_t i = 0; i < FaultGuard::kMaxGuards; ++i) {
    auto guard = FaultGuard::Make(memory.data(), kPage);
    ASSERT_TRUE(guard.has_value()) << i;
    guards.push_back(*std::move(guard));
  }
  EXPECT_FALSE(FaultGuard::Make(memory.data(), kPage).has_value());
  guards.pop_back();
  EXPECT_TRUE(FaultGuard::Make(memory.data(), kPage).has_value());
}

class SharedMemoryTest : public ::testing::Test {
 protected:
  using Result = absl::StatusOr<Regions::Region>;

  Result Map(SharedMemory* memory, size_t bytes, const std::string& client = "a",
             RegionBudget::OnGiveBack on_give_back = nullptr) {
    return memory->Map(FileDescriptor(dup(Memfd(bytes).fd())), bytes, /*read_only=*/false, client,
                       std::move(on_give_back));
  }
  void Start(const SharedMemory::Options& options) {
    memory_ = std::make_unique<SharedMemory>(options, &device_, &bytes_, &regions_);
  }
  // A region of that many pages, which is used until the test ends or drops it. Once it has to be
  // given back, `name` is in ended_.
  absl::Status Use(const std::string& name, size_t pages) {
    Result region = Map(memory_.get(), pages * kPage, name.substr(0, 1),
                        [this, name] { ended_.push_back(name); });
    if (region.ok()) used_[name] = *std::move(region);
    return region.status();
  }

  testing::FakeDeviceControl control_;
  testing::FakeDevice device_{&control_};
  Gauge bytes_, regions_;
  std::unique_ptr<SharedMemory> memory_;  // of Start
  std::vector<std::string> ended_;
  std::map<std::string, Regions::Region> used_;  // by name, which begins with the client
};

TEST_F(SharedMemoryTest, QuotasHoldUntilTheLastUseEnds) {
  SharedMemory::Options options;
  options.total_bytes = 4 * kPage;
  options.client_bytes = 3 * kPage;
  options.client_regions = 2;
  SharedMemory memory(options, &device_, &bytes_, &regions_);
  auto first = Map(&memory, kPage);
  const auto second = Map(&memory, kPage);
  ASSERT_EQ(first.status(), absl::OkStatus());
  ASSERT_EQ(second.status(), absl::OkStatus());
  const absl::Status many = Map(&memory, kPage).status();
  EXPECT_THAT(many.message(), HasSubstr("at most 2"));
  EXPECT_THAT(many, HasInfo("QUOTA_EXCEEDED", {{"limit", "client_shared_regions"},
                                               {"needed", "1"},
                                               {"used", "2"},
                                               {"allowed", "2"}}));
  const absl::Status full = Map(&memory, 3 * kPage, "b").status();
  EXPECT_THAT(full.message(), HasSubstr("of all clients"));
  EXPECT_THAT(full, HasInfo("SERVER_FULL"));
  EXPECT_THAT(Map(&memory, 5 * kPage, "b").status(),
              HasInfo("TOO_LARGE", {{"needed_bytes", absl::StrCat(5 * kPage)},
                                    {"limit_bytes", absl::StrCat(4 * kPage)}}));
  Regions::Region in_use = *first;
  first->reset();
  EXPECT_EQ(Map(&memory, kPage).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(bytes_.Value(), 2 * kPage);
  in_use.reset();
  EXPECT_EQ(bytes_.Value(), kPage);
  const absl::Status share = Map(&memory, 3 * kPage).status();
  EXPECT_THAT(share.message(), HasSubstr("per client"));
  EXPECT_THAT(share, HasInfo("QUOTA_EXCEEDED", {{"limit", "client_shared_memory_bytes"},
                                                {"needed", absl::StrCat(3 * kPage)},
                                                {"used", absl::StrCat(kPage)},
                                                {"allowed", absl::StrCat(3 * kPage)}}));
  EXPECT_EQ(Map(&memory, kPage).status(), absl::OkStatus());
}

TEST_F(SharedMemoryTest, WhoHasTheMostRegionsGivesBackItsNewest) {
  SharedMemory::Options options;
  options.total_regions = 6;
  options.client_regions = 3;
  Start(options);
  for (const char* name : {"a1", "b1", "c1", "a2", "b2", "a3"}) {
    ASSERT_EQ(Use(name, 1), absl::OkStatus());
  }
  EXPECT_THAT(Use("a4", 1).message(), HasSubstr("at most 3 are allowed per client"));
  EXPECT_THAT(Use("b3", 1), HasInfo("SERVER_FULL")) << "it would have as many as a";
  EXPECT_THAT(ended_, IsEmpty());
  EXPECT_EQ(Use("d1", 1), absl::OkStatus());
  EXPECT_THAT(ended_, ElementsAre("a3"));
  EXPECT_EQ(Use("e1", 1), absl::OkStatus());  // of a or b
  EXPECT_EQ(Use("f1", 1), absl::OkStatus());  // of the other
  EXPECT_THAT(ended_, UnorderedElementsAre("a3", "a2", "b2"));
  EXPECT_THAT(Use("g1", 1), HasInfo("SERVER_FULL")) << "each has one";
  EXPECT_EQ(ended_.size(), 3u);
}

TEST_F(SharedMemoryTest, WhoHasTheMostBytesGivesBackUntilTheNewRegionFits) {
  SharedMemory::Options options;
  options.total_bytes = 8 * kPage;
  options.client_bytes = 6 * kPage;
  Start(options);
  for (const char* name : {"b1", "b2", "a1", "a2", "a3", "a4", "a5", "a6"}) {
    ASSERT_EQ(Use(name, 1), absl::OkStatus());
  }
  EXPECT_EQ(Use("c1", 2), absl::OkStatus());
  EXPECT_THAT(ended_, ElementsAre("a6", "a5"));
  EXPECT_EQ(Use("a7", 1).code(), absl::StatusCode::kResourceExhausted);
  used_.erase("a6");  // it counts no more, mapped or not
  EXPECT_EQ(Use("d1", 1), absl::OkStatus());
  EXPECT_THAT(ended_, ElementsAre("a6", "a5", "a4"));
  used_.clear();
  EXPECT_EQ(bytes_.Value(), 0);
  EXPECT_EQ(Use("a8", 6), absl::OkStatus());
}

TEST_F(SharedMemoryTest, NobodyGivesBackForAClientThatWouldHaveAsMuch) {
  SharedMemory::Options options;
  options.total_bytes = 6 * kPage;
  Start(options);
  for (const char* name : {"a1", "a2", "a3", "a4", "a5", "b1"}) {
    ASSERT_EQ(Use(name, 1), absl::OkStatus());
  }
  // Without a5 and a4, a would still have no more than c.
  const absl::Status full = Use("c1", 3);
  EXPECT_THAT(full, HasInfo("SERVER_FULL"));
  EXPECT_THAT(full.message(), HasSubstr("no client has more than this one would"));
  EXPECT_THAT(ended_, IsEmpty());
  EXPECT_EQ(regions_.Value(), 6);
  // Its regions are as before, and in the same order.
  EXPECT_EQ(Use("c1", 2), absl::OkStatus());
  EXPECT_THAT(ended_, ElementsAre("a5", "a4"));
}

TEST_F(SharedMemoryTest, WhatIsGivenBackAndStillUsedIsBounded) {
  SharedMemory::Options options;
  options.total_bytes = 4 * kPage;
  Start(options);
  ASSERT_EQ(Use("a1", 3), absl::OkStatus());
  ASSERT_EQ(Use("b1", 2), absl::OkStatus());
  ASSERT_THAT(ended_, ElementsAre("a1"));
  ASSERT_EQ(Use("c1", 2), absl::OkStatus());
  EXPECT_EQ(bytes_.Value(), 7 * kPage);
  const absl::Status full = Use("d1", 1);
  EXPECT_THAT(full, HasInfo("SERVER_FULL"));
  EXPECT_THAT(full.message(), HasSubstr("12288 bytes in 1 regions that clients had to give back"));
  EXPECT_THAT(ended_, ElementsAre("a1"));
  used_.erase("a1");
  EXPECT_EQ(bytes_.Value(), 4 * kPage);
  EXPECT_EQ(Use("d1", 1), absl::OkStatus());
  EXPECT_EQ(ended_.size(), 2u);
}

TEST_F(SharedMemoryTest, RegionsThatAreGivenBackAndStillUsedAreBounded) {
  SharedMemory::Options options;
  options.total_regions = 2;
  Start(options);
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(Use(absl::StrCat(name, 1), 1), absl::OkStatus());
    ASSERT_EQ(Use(absl::StrCat(name, 2), 1), absl::OkStatus());
    ASSERT_EQ(Use("c1", 1), absl::OkStatus());
    used_.erase(absl::StrCat(name, 1));
    used_.erase("c1");
  }
  ASSERT_THAT(ended_, ElementsAre("a2", "b2"));
  ASSERT_EQ(Use("d1", 1), absl::OkStatus());
  ASSERT_EQ(Use("d2", 1), absl::OkStatus());
  EXPECT_THAT(Use("c1", 1), HasInfo("SERVER_FULL"));
  used_.erase("a2");
  EXPECT_EQ(Use("c1", 1), absl::OkStatus());
  EXPECT_THAT(ended_, ElementsAre("a2", "b2", "d2"));
}

TEST_F(SharedMemoryTest, WhoGivesBackMayUnmapAtOnce) {
  SharedMemory::Options options;
  options.total_bytes = 2 * kPage;
  SharedMemory memory(options, &device_, &bytes_, &regions_);
  Result region = Map(&memory, 2 * kPage, "a", [&] { region->reset(); });
  ASSERT_EQ(region.status(), absl::OkStatus());
  const Result other = Map(&memory, kPage, "b");
  EXPECT_EQ(other.status(), absl::OkStatus());
  EXPECT_EQ(*region, nullptr);
  EXPECT_EQ(bytes_.Value(), kPage);
}

TEST_F(SharedMemoryTest, WhatCannotBeMappedIsNotCounted) {
  SharedMemory memory({}, &device_, &bytes_, &regions_);
  const Memfd file(kPage);
  FileDescriptor read_only(open(absl::StrCat("/proc/self/fd/", file.fd()).c_str(), O_RDONLY));
  EXPECT_EQ(memory.Map(read_only, kPage, /*read_only=*/false, "a").status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(memory.Map(FileDescriptor(dup(file.fd())), 2 * kPage, /*read_only=*/false, "a")
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(regions_.Value(), 0);
  EXPECT_EQ(bytes_.Value(), 0);
}

TEST(RegionsTest, FindsOnlyItsOwnUntilTheyAreRemoved) {
  const Memfd file(kPage);
  Regions regions, others;
  const Regions::Region region = file.Map();
  const std::string id = regions.Add(region), second = regions.Add(region);
  EXPECT_EQ(id.size(), 16u);
  EXPECT_NE(id, second);
  EXPECT_EQ(*regions.Find(id), region);
  const absl::Status foreign = others.Find(id).status();
  EXPECT_EQ(foreign.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(foreign, others.Find(std::string(16, 'x')).status());
  EXPECT_THAT(foreign, HasInfo("REGION_LOST"));
  EXPECT_EQ(regions.Remove(id), region);
  EXPECT_EQ(regions.Remove(id), nullptr);
  EXPECT_EQ(regions.Find(id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*regions.Find(second), region);
  regions.Clear();
  EXPECT_EQ(regions.Find(second).status().code(), absl::StatusCode::kNotFound);
}

// Request with Q, K and V next to each other in a region, then O and LSE.
class SharedTensorsTest : public ::testing::Test {
 protected:
  SharedTensorsTest() {
    request_.return_lse = true;
    uint64_t offset = 16;
    const size_t bytes[] = {request_.query_bytes, request_.key_bytes, request_.value_bytes,
                            request_.output_bytes(), request_.lse_bytes()};
    for (int i = 0; i < kNumTensors; ++i) {
      request_.ranges[i] = {region_, offset, bytes[i]};
      offset += AlignUp(bytes[i], 16);
    }
  }

  absl::Status Validate() {
    const RequestLimits limits = {16, 16, {kernels::DType::kFloat16}, {64}, 1e12};
    return ValidateAttend(request_, limits);
  }

  Memfd memory_{4 * kPage};
  std::shared_ptr<const SharedRegion> region_ = memory_.Map();
  AttendRequest request_ = testing::MakeRequest(2, 3);
  StagingPool pool_{1 << 20, StagingPool::HeapAllocator()};
};

TEST_F(SharedTensorsTest, TakeNoStagingMemory) {
  ASSERT_EQ(Validate(), absl::OkStatus());
  AttendTensors tensors;
  ASSERT_EQ(tensors.Allocate(request_, &pool_), absl::OkStatus());
  EXPECT_EQ(pool_.used_bytes(), 0u);
  EXPECT_EQ(tensors.query(), region_->data() + 16);
  EXPECT_EQ(tensors.value(), region_->data() + request_.ranges[kValue].offset);
  EXPECT_EQ(reinterpret_cast<std::byte*>(tensors.lse()),
            region_->data() + request_.ranges[kLse].offset);
  EXPECT_FALSE(tensors.in_reach()) << "nobody has pinned it";
  for (const auto& pieces : {tensors.inputs(), tensors.results()}) {
    for (const auto& piece : pieces)
      EXPECT_LE(piece.host + piece.bytes, region_->data() + 4 * kPage);
  }
}

TEST_F(SharedTensorsTest, StagingMemoryIsForTheRest) {
  request_.ranges[kQuery] = {};
  request_.ranges[kLse] = {};
  AttendTensors tensors;
  ASSERT_EQ(tensors.Allocate(request_, &pool_), absl::OkStatus());
  ASSERT_EQ(tensors.inputs().size(), 2u) << "K and V follow each other, as in a block";
  EXPECT_EQ(tensors.inputs()[0].bytes, request_.query_bytes);
  EXPECT_EQ(tensors.inputs()[1].host, region_->data() + request_.ranges[kKey].offset);
  ASSERT_EQ(tensors.results().size(), 2u);
  EXPECT_EQ(tensors.results()[1].bytes, request_.lse_bytes());
  request_.ranges[kValue].offset += 16;
  AttendTensors apart;
  ASSERT_EQ(apart.Allocate(request_, &pool_), absl::OkStatus());
  EXPECT_EQ(apart.inputs().size(), 3u);
  const auto* const lse = reinterpret_cast<std::byte*>(tensors.lse());
  const StagingBuffer results = tensors.TakeResults();
  EXPECT_EQ(lse, results.data() + tensors.lse_offset());
}

TEST_F(SharedTensorsTest, RangesMustFit) {
  const auto refused = [&](Tensor tensor, uint64_t offset, const char* why) {
    const MemoryRange good = request_.ranges[tensor];
    request_.ranges[tensor].offset = offset;
    const absl::Status status = Validate();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(why));
    request_.ranges[tensor] = good;
  };
  refused(kQuery, 8, "query_range.offset: 8 is not a multiple of 16");
  refused(kKey, 4 * kPage, "key_range.offset: 16384, and the tensor has");
  refused(kValue, 4 * kPage - request_.value_bytes + 16, "the region has 16384");
  refused(kOutput, ~uint64_t{15}, "output_range");
  for (const Tensor output : {kOutput, kLse}) {  // an input's size is that of its range
    for (const uint64_t bytes : {uint64_t{0}, request_.ranges[output].bytes - 1, ~uint64_t{0}}) {
      MemoryRange& range = request_.ranges[output];
      const uint64_t want = std::exchange(range.bytes, bytes);
      EXPECT_EQ(Validate().message(),
                absl::StrCat(output == kOutput ? "output" : "lse", "_range.bytes: ", bytes,
                             ", but the tensor has ", want));
      range.bytes = want;
    }
  }
  const size_t query_bytes = std::exchange(request_.query_bytes, 16);
  EXPECT_THAT(Validate().message(), HasSubstr("query_range.bytes: 16, but 2 rows of"));
  request_.query_bytes = query_bytes;
  request_.return_lse = false;
  EXPECT_THAT(Validate().message(), HasSubstr("lse_range: is set"));
  request_.return_lse = true;
  request_.ranges[kOutput].region = memory_.Map(/*read_only=*/true);
  EXPECT_THAT(Validate().message(), HasSubstr("output_range: the region is read_only"));
}

}  // namespace
}  // namespace flashcore::server

// The linker option --wrap directs calls of munmap here.
extern "C" {
int __real_munmap(void* address, size_t bytes);
int __wrap_munmap(void* address, size_t bytes) {
  if (flashcore::server::before_munmap) flashcore::server::before_munmap(address);
  return __real_munmap(address, bytes);
}
}
