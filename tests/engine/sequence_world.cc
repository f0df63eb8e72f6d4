#include "tests/engine/sequence_world.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "server/kv/operation.h"
#include "tests/device/device_setting.h"
#include "tests/engine/thread_alarm.h"

namespace flashcore::server::testing {
namespace {

using absl::StatusCode;

constexpr SequenceShape kShapes[] = {
    {1, 1, 32, kernels::DType::kFloat16},   // pages of 8 KiB
    {3, 2, 32, kernels::DType::kBFloat16},  // of 16 KiB
    {1, 2, 64, kernels::DType::kFloat16},   // of 32 KiB
};

constexpr size_t kMaxSequences = 24;
constexpr const char* kClients[] = {"alice", "bob"};

// Limits, of a world that has them.
constexpr size_t kClientSequences = 8;
constexpr size_t kClientKvBytes = size_t{224} << 10;
constexpr size_t kStagingBytes = size_t{96} << 10;
constexpr std::chrono::seconds kIdleTimeout(1);

bool SameShape(const SequenceShape& a, const SequenceShape& b) {
  return a.num_layers == b.num_layers && a.num_kv_heads == b.num_kv_heads &&
         a.head_dim == b.head_dim && a.kv_dtype == b.kv_dtype;
}

}  // namespace

SequenceWorld::SequenceWorld(std::unique_ptr<Device> device, const Setup& setup)
    : setup_(setup), engine_(EngineOptions(), std::move(device), setup.clock, &metrics_) {}

Engine::Options SequenceWorld::EngineOptions() const {
  Engine::Options options;
  options.sequences.superblock_bytes = kSuperblockBytes;
  options.batcher.max_batch_requests = 6;
  if (cuts()) options.batcher.max_launch = setup_.max_launch;
  if (!has_limits()) return options;
  options.sequences.evict_lru = true;
  options.sequences.idle_timeout = kIdleTimeout;
  options.sequences.client_sequences = kClientSequences;
  options.sequences.client_kv_bytes = kClientKvBytes;
  options.staging_memory_bytes = kStagingBytes;
  options.staging_wait = std::chrono::hours(1);
  options.max_waiting_bytes = kStagingBytes / 4;
  return options;
}

bool SequenceWorld::Full() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequences_.size() >= kMaxSequences;
}

SequencePtr SequenceWorld::PickAny(uint32_t random) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequences_.empty() ? nullptr : sequences_[random % sequences_.size()];
}

std::vector<SequencePtr> SequenceWorld::PickSome(Dice* dice, size_t count) const {
  const uint32_t start = dice->random();
  const bool forks = dice->OneIn(2);  // of one another, so that they share pages
  std::vector<SequencePtr> picked;
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < sequences_.size() && picked.size() < count; ++i) {
    const SequencePtr& sequence = sequences_[(start + i) % sequences_.size()];
    if (picked.empty() || (forks ? picked[0]->family == sequence->family
                                 : SameShape(picked[0]->shape, sequence->shape))) {
      picked.push_back(sequence);
    }
  }
  std::sort(picked.begin(), picked.end());
  return picked;
}

SequencePtr SequenceWorld::Remove(uint32_t random) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sequences_.empty()) return nullptr;
  std::swap(sequences_[random % sequences_.size()], sequences_.back());
  const SequencePtr removed = std::move(sequences_.back());
  sequences_.pop_back();
  return removed;
}

void SequenceWorld::Add(const SequencePtr& sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  sequences_.push_back(sequence);
}

bool SequenceWorld::OverQuota(const absl::Status& status) {
  if (!has_limits() || status.code() != StatusCode::kResourceExhausted) return false;
  if (absl::StartsWith(status.message(), "client quota: the sequences of this client hold ")) {
    Note("refused by the quota of K/V");  // a fork pays for the pages that it shares
  } else {
    EXPECT_EQ(status.message(), "client quota: this client has 8 sequences, which is the limit");
    Note("refused by the quota of sequences");
  }
  return true;
}

void SequenceWorld::Create(Dice* dice) {
  if (Full()) return;
  SequenceShape shape = kShapes[dice->Below(std::size(kShapes))];
  for (const auto& [kv_dtype, head_dims] : engine_.options().sequences.head_dims) {
    if (!kernels::Is8Bit(kv_dtype)) continue;
    const bool has_it = std::count(head_dims.begin(), head_dims.end(), shape.head_dim) > 0;
    if (has_it && dice->OneIn(3)) shape.kv_dtype = kv_dtype;
  }
  const char* client = kClients[dice->Below(std::size(kClients))];
  const TimePoint now = clock().Now();
  const auto info = engine_.sequences().Create(
      shape, {dice->OneIn(4), /*shared=*/false, kGroupName}, IdentityOf(client));
  if (OverQuota(info.status())) return;
  ASSERT_TRUE(info.ok()) << info.status();
  uint64_t family = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    family = ++families_;
  }
  const auto sequence = std::make_shared<ModelSequence>(*info, client, family, &pages_);
  sequence->MarkUsed(now);
  ExpectAgrees(*sequence, *info);
  Add(sequence);
}

void SequenceWorld::Fork(const SequencePtr& parent, std::optional<uint64_t> length, Dice* dice,
                         bool too_long) {
  if (Full()) return;
  const char* client = kClients[dice->Below(std::size(kClients))];
  const TimePoint now = clock().Now();
  const auto info = engine_.sequences().Fork(
      parent->id, length, {dice->OneIn(4), /*shared=*/false, kGroupName}, IdentityOf(client));
  if (OverQuota(info.status())) return;
  ExpectOutcome(info.status(), parent, too_long);
  if (!info.ok()) return;
  parent->MarkUsed(now);
  const auto child = std::make_shared<ModelSequence>(*info, client, parent->family, &pages_);
  child->MarkUsed(now);
  child->layers = parent->layers;
  if (length.has_value()) {
    for (ModelLayer& layer : child->layers) layer.Truncate(*length);
  }
  ExpectAgrees(*child, *info);
  Add(child);
}

void SequenceWorld::Delete(uint32_t random) {
  const SequencePtr sequence = Remove(random);
  if (sequence == nullptr) return;
  sequence->doomed = true;
  const absl::Status status =
      engine_.sequences().Delete(sequence->id, IdentityOf(sequence->client));
  sequence->gone = true;
  if (status.code() == StatusCode::kNotFound) {
    std::lock_guard<std::mutex> lock(mutex_);
    CountLost(*sequence);
  } else {
    EXPECT_EQ(status, absl::OkStatus());
  }
  EXPECT_EQ(engine_.sequences().Get(sequence->id, IdentityOf("alice")).status().code(),
            StatusCode::kNotFound);
}

void SequenceWorld::Trespass(const SequencePtr& sequence, Dice* dice) {
  SequenceStore& store = engine_.sequences();
  const SequenceId id = sequence->id;
  const bool member = dice->OneIn(2);  // of the group
  const Identity other =
      member ? IdentityOf(sequence->client == "alice" ? "bob" : "alice") : Identity{"mallory", {}};
  absl::Status status;
  switch (dice->Below(member ? 2 : 4)) {
    case 0:
      status = store.Truncate(id, 0, {}, other).status();
      break;
    case 1:
      status = store.Delete(id, other);
      break;
    case 2:
      status = store.Get(id, other).status();
      break;
    default:
      status = store.Fork(id, {}, {}, other).status();
  }
  if (member && status.code() == StatusCode::kNotFound) return ExpectLost(sequence);
  EXPECT_EQ(status.code(), member ? StatusCode::kPermissionDenied : StatusCode::kNotFound);
  Note(absl::StrCat("trespassed: ", absl::StatusCodeToString(status.code())));
}

void SequenceWorld::ExpectAgrees(const ModelSequence& sequence, const SequenceInfo& info) const {
  EXPECT_TRUE(info.id == sequence.id);
  EXPECT_EQ(info.layer_lengths, sequence.lengths());
  EXPECT_EQ(info.kv_bytes, sequence.kv_bytes());
  EXPECT_LE(info.hot_bytes, info.kv_bytes);
  EXPECT_EQ(info.settings.pin, sequence.pin);
}

void SequenceWorld::ExpectOutcome(const absl::Status& status, const SequencePtr& sequence,
                                  bool wrong) {
  if (status.code() == StatusCode::kNotFound) return ExpectLost(sequence);
  EXPECT_EQ(status.code(), wrong ? StatusCode::kInvalidArgument : StatusCode::kOk) << status;
}

void SequenceWorld::ExpectLost(const SequencePtr& sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(sequences_.begin(), sequences_.end(), sequence);
  if (found == sequences_.end()) return;  // being deleted, or known to be lost
  sequences_.erase(found);
  sequence->gone = true;
  CountLost(*sequence);
}

void SequenceWorld::CountLost(const ModelSequence& sequence) {
  EXPECT_TRUE(has_limits()) << "a sequence is gone that nobody deleted";
  ++lost_;
  if (clock().Now() - sequence.last_used.load() < kIdleTimeout) ++lost_early_;
}

void SequenceWorld::Note(const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++noted_[what];
}

void SequenceWorld::PassTime(Dice* dice) {
  if (!has_limits()) return;
  Nanoseconds step = std::chrono::milliseconds(dice->OneIn(40) ? 500 : dice->Below(40));
  if (dice->OneIn(200)) step = 2 * kIdleTimeout;  // only leased sequences outlive it
  setup_.limits_clock->Advance(step);
  if (step >= kIdleTimeout || dice->OneIn(8)) engine_.sequences().ExpireIdle();
}

absl::Status SequenceWorld::WaitFor(AttendJob* job) {
  if (job->ended.wait_for(std::chrono::minutes(2)) != std::future_status::ready) {
    std::cerr << "a request does not end" << std::endl;
    std::abort();  // the engine has its address
  }
  const absl::Status status = job->ended.get();
  Note(absl::StatusCodeToString(status.code()));
  return status;
}

void SequenceWorld::MovePagesUntil(const std::atomic<bool>& stop, unsigned seed) {
  std::mt19937 random(seed);
  const auto pause = [&] {
    // gate: jitter, no wait
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  };
  while (!stop) {
    const PageMoves moves = engine_.sequences().BeginMoves(random() % (size_t{256} << 10));
    pause();
    if (moves.empty()) continue;
    const bool ok = random() % 8 != 0;  // if not, nothing is copied
    for (const PageMoves::Group& group : moves.groups) {
      for (const kernels::PageCopy& page : group.copies) {
        if (ok) setup_.copy(page.to, page.from, static_cast<size_t>(group.page_bytes));
      }
    }
    engine_.sequences().EndMoves(moves, ok);
  }
}

void SequenceWorld::ExpectAllAgree() {
  SequenceStore& store = engine_.sequences();
  store.ExpireIdle();  // now, and not while it compares
  for (const SequencePtr& sequence : std::vector<SequencePtr>(sequences_)) {
    const auto info = store.Get(sequence->id, IdentityOf("alice"));
    if (info.status().code() == StatusCode::kNotFound) {
      ExpectLost(sequence);
      continue;
    }
    ASSERT_TRUE(info.ok()) << info.status();
    ExpectAgrees(*sequence, *info);
    for (uint32_t layer = 0; layer < sequence->shape.num_layers; ++layer) {
      ExpectHolds(*sequence, layer);
    }
  }
  // The engine may be moving pages, which then count twice.
  SequenceStore::Stats stats = store.stats();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (stats.pages != pages_.pages && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stats = store.stats();
  }
  EXPECT_EQ(stats.pages, pages_.pages);
  EXPECT_EQ(stats.hot.used_bytes + stats.cold.used_bytes, pages_.bytes);
  EXPECT_EQ(stats.sequences, sequences_.size());
  for (const std::string client : kClients) {
    const auto of_client = [&](const SequencePtr& sequence) { return sequence->client == client; };
    EXPECT_EQ(store.List({client, {}}, 0, {1000}).sequences.size(),
              std::count_if(sequences_.begin(), sequences_.end(), of_client));
  }
  EXPECT_EQ(engine_.staging().used_bytes(), 0u);
  EXPECT_EQ(engine_.staging().waiting(), 0u);
  if (has_limits()) ExpectLimitsHold();
}

void SequenceWorld::ExpectLimitsHold() {
  ThreadAlarm::WaitForAll();
  EXPECT_EQ(metrics_.sequences_evicted.Value() + metrics_.sequences_expired.Value(), lost_);
  EXPECT_GE(metrics_.sequences_evicted.Value(), lost_early_) << "sequences expire too early";
  for (const char* client : kClients) {
    const SequenceStore::Listing listing = engine_.sequences().List({client, {}}, 0, {1000});
    EXPECT_LE(listing.sequences.size(), kClientSequences);
    for (const SequenceInfo& info : listing.sequences) EXPECT_LT(info.idle, kIdleTimeout);
  }
}

// Compares a layer row by row, as a launch reads it.
void SequenceWorld::ExpectHolds(const ModelSequence& sequence, uint32_t layer) {
  AttendOperation operation;
  operation.identity = IdentityOf("alice");
  operation.request = MakeRequest(1, 0, sequence.shape.num_kv_heads, sequence.shape.num_kv_heads,
                                  sequence.shape.head_dim);
  operation.request.dtype = sequence.shape.dtype;
  operation.request.layer = layer;
  operation.request.spans[0].sequence_id = sequence.id.ToBytes();
  ASSERT_EQ(AdmitNow(&engine_, &operation), absl::OkStatus());
  Launch launch;
  AttendOperation* const operations[] = {&operation};
  engine_.sequences().BeginLaunch(
      operations, [](AttendOperation*) { return true; }, &launch);
  ASSERT_EQ(launch.operations.size(), 1u);
  std::vector<kernels::Span> spans;
  AppendSpans(launch, engine_.device().kv_memory().base, launch.pages.data(), &spans);
  const kernels::KvView& has = spans[0].kv;
  const kernels::KvView should = sequence.layers[layer].view();
  ASSERT_EQ(has.rows, should.rows);
  const kernels::PageLayout layout = sequence.shape.page_layout();
  const auto expect_same = [&](int32_t row, int64_t in_page, size_t bytes) {
    const auto offset = [&](const kernels::KvView& kv) {
      return kv.pages[row / kernels::kPageTokens] * kv.page_stride + in_page;
    };
    std::vector<std::byte> bytes_has(bytes);
    setup_.copy(bytes_has.data(), has.key + offset(has), bytes);
    EXPECT_EQ(std::memcmp(bytes_has.data(), should.key + offset(should), bytes), 0) << row;
    setup_.copy(bytes_has.data(), has.value + offset(has), bytes);
    EXPECT_EQ(std::memcmp(bytes_has.data(), should.value + offset(should), bytes), 0) << row;
  };
  for (int32_t row = 0; row < has.rows; ++row) {
    const int32_t in_page = row % kernels::kPageTokens;
    for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
      expect_same(row, head * layout.head_bytes() + in_page * layout.row_bytes(),
                  layout.row_bytes());
      const size_t scale_bytes = kernels::KvRowScaleBytes(layout.kv_dtype);
      if (scale_bytes > 0) {
        expect_same(row, layout.scales_offset(head) + in_page * scale_bytes, scale_bytes);
      }
    }
  }
  engine_.sequences().EndLaunch(launch, true);
}

std::vector<std::string> SequenceWorld::MissingOutcomes() const {
  std::vector<std::string> missing;
  const auto want = [&](bool happened, const std::string& what) {
    if (!happened) missing.push_back(what);
  };
  for (const char* what :
       {"trespassed: NOT_FOUND", "trespassed: PERMISSION_DENIED", "OK", "CANCELLED", "NOT_FOUND",
        "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}) {
    want(noted_.count(what) > 0, what);
  }
  if (has_limits()) {
    want(metrics_.sequences_evicted.Value() > 0, "an eviction");
    want(metrics_.sequences_expired.Value() > 0, "an expiry");
    for (const char* what :
         {"refused by the quota of K/V", "waited for staging: OK", "waited for staging: CANCELLED",
          "waited for staging: DEADLINE_EXCEEDED", "waited for staging: RESOURCE_EXHAUSTED"}) {
      want(noted_.count(what) > 0, what);
    }
  }
  if (engine_.device().kv_memory().hot_bytes > 0) {
    want(metrics_.kv_promoted_bytes.Value() > 0, "a promotion");
    want(metrics_.kv_demoted_bytes.Value() > 0, "a demotion");
  }
  return missing;
}

void SequenceWorld::DeleteAll() {
  for (const SequencePtr& sequence : sequences_) {
    EXPECT_EQ(engine_.sequences().Delete(sequence->id, IdentityOf(sequence->client)),
              absl::OkStatus());
  }
  sequences_.clear();
}

void SequenceWorld::ExpectEmpty() {
  const SequenceStore::Stats stats = engine_.sequences().stats();
  EXPECT_EQ(stats.sequences, 0u);
  EXPECT_EQ(stats.pages, 0u);
  EXPECT_EQ(stats.metadata_bytes, 0u);
  EXPECT_EQ(stats.hot.used_bytes + stats.cold.used_bytes, 0u);
}

}  // namespace flashcore::server::testing
