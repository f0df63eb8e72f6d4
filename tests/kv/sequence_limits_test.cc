// Eviction, expiry and the clients' quotas under random use, compared with a model that predicts
// every answer: which sequence is evicted, who pays for a shared page, when a client is refused.
#include <algorithm>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/test_seed.h"
#include "tests/kv/sequence_store_fixture.h"

namespace flashcore::server {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using testing::OperationPtr;
using testing::SequenceStoreTest;

constexpr const char* kClients[] = {"alice", "bob", "carol"};
constexpr uint32_t kLayers = 2;
constexpr size_t kPages = 24;
constexpr size_t kClientPages = 14;
constexpr size_t kClientSequences = 6;
constexpr std::chrono::seconds kIdleTimeout(10);

// Pages that a client pays for, by client.
using Payments = std::map<std::string, size_t>;

// A page, alive as long as a layer holds it.
struct Page {
  explicit Page(size_t* count) : alive(count) { ++*alive; }
  ~Page() { --*alive; }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  size_t* const alive;
  std::map<std::string, size_t> holders;  // layers that hold it, by client
};

// A client's charge as long as a layer of it holds the page, once for all its layers.
class Payment {
 public:
  Payment(Page* page, Payments* payments, std::string client)
      : page_(*page), paid_((*payments)[client]), client_(std::move(client)) {
    if (++page_.holders[client_] == 1) ++paid_;
  }
  ~Payment() {
    if (--page_.holders[client_] == 0) --paid_;
  }
  Payment(const Payment&) = delete;
  Payment& operator=(const Payment&) = delete;

 private:
  Page& page_;
  size_t& paid_;
  const std::string client_;
};

struct HeldPage {
  std::shared_ptr<Page> page;
  std::shared_ptr<Payment> payment;  // destroyed before the page
};

struct Layer {
  std::string text;
  std::vector<HeldPage> pages;
};

struct Model {
  SequenceId id;
  std::string client;
  TimePoint last_used;
  int leases = 0;
  bool gone = false;
  std::vector<Layer> layers = std::vector<Layer>(kLayers);

  size_t pages() const { return layers[0].pages.size() + layers[1].pages.size(); }
  size_t shortest() const { return std::min(layers[0].text.size(), layers[1].text.size()); }
};
using ModelPtr = std::shared_ptr<Model>;

class SequenceLimitsTest : public SequenceStoreTest, public ::testing::WithParamInterface<bool> {
 protected:
  // A leased operation on one layer.
  struct Leased {
    uint32_t layer;
    std::vector<Part> parts;
    std::vector<ModelPtr> models;  // [parts]
    OperationPtr operation;
  };

  SequenceLimitsTest() {
    SequenceStore::Options options;
    options.evict_lru = GetParam();
    options.idle_timeout = kIdleTimeout;
    options.client_kv_bytes = kClientPages * kPageBytes;
    options.client_sequences = kClientSequences;
    Open(options, kPages, /*hot_pages=*/8);
  }

  size_t Below(size_t n) { return random_() % n; }
  bool OneIn(size_t n) { return Below(n) == 0; }
  std::string AnyClient() { return kClients[Below(std::size(kClients))]; }
  ModelPtr Any() {
    return by_use_.empty() ? nullptr : *std::next(by_use_.begin(), Below(by_use_.size()));
  }
  HeldPage Hold(std::shared_ptr<Page> page, const std::string& client) {
    auto payment = std::make_shared<Payment>(page.get(), &payments_, client);
    return {std::move(page), std::move(payment)};
  }
  // Evicts the least recently used sequence of `client`. False if it must not or cannot.
  bool Evict(const std::string& client) {
    const auto found = std::find_if(by_use_.begin(), by_use_.end(), [&](const ModelPtr& model) {
      return model->leases == 0 && model->client == client;
    });
    if (!GetParam() || found == by_use_.end()) return false;
    const ModelPtr victim = *found;
    evicted_.insert(victim->id.ToBytes());
    victim->gone = true;
    for (Layer& layer : victim->layers) layer.pages.clear();
    by_use_.erase(Find(victim));
    Count("evicted");
    return true;
  }
  bool EvictForOwnLimit(const std::string& client) {
    if (!Evict(client)) return false;
    Count("evicted for the client's own limit");
    return true;
  }
  // Evicts for a page of `client`, since the memory is full: of those that hold more than it would
  // then, largest first; else of `client`.
  bool EvictForAll(const std::string& client) {
    std::vector<std::pair<size_t, std::string>> larger;
    for (const char* other : kClients) {
      if (payments_[other] > payments_[client] + 1) larger.emplace_back(payments_[other], other);
    }
    std::stable_sort(larger.begin(), larger.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [pages, other] : larger) {
      if (!Evict(other)) continue;
      Count("a larger one gave back");
      return true;
    }
    if (!Evict(client)) return false;
    Count("gave back for itself");
    return true;
  }
  std::vector<SequenceId> IdsOf(const std::string& client) const {
    std::vector<SequenceId> ids;
    for (const ModelPtr& model : by_age_) {
      if (!model->gone && model->client == client) ids.push_back(model->id);
    }
    return ids;
  }

  void MarkUsed(const ModelPtr& model) {
    model->last_used = clock_.Now();
    if (!model->gone) by_use_.splice(by_use_.end(), by_use_, Find(model));
  }
  std::list<ModelPtr>::iterator Find(const ModelPtr& model) {
    return std::find(by_use_.begin(), by_use_.end(), model);
  }
  void Remove(const ModelPtr& model) {
    model->gone = true;
    for (Layer& layer : model->layers) layer.pages.clear();
    by_use_.erase(Find(model));
    EXPECT_FALSE(Exists(model->id));
  }

  // ---- What clients do.

  void Step() {
    switch (Below(12)) {
      case 0:
      case 1:
        return TryCreate(nullptr);
      case 2:
      case 3:
        return TryCreate(Any());
      case 4:
        return Truncate();
      case 5:
        if (OneIn(2)) Delete();
        return;
      case 6:
        return Expire();
      case 7:
        if (!held_.empty()) End(Below(held_.size()));
        return;
      default:
        return Request();
    }
  }

  // Creates a sequence, or forks `parent`.
  void TryCreate(const ModelPtr& parent) {
    const std::string client = AnyClient();
    std::optional<uint64_t> length;
    if (parent != nullptr && OneIn(2)) length = Below(parent->shortest() + 1);
    const SequenceSettings settings = {OneIn(4), /*shared=*/true};
    const auto info = parent == nullptr ? store_->Create(Shape(kLayers), settings, {client, {}})
                                        : store_->Fork(parent->id, length, settings, {client, {}});
    const auto model = std::make_shared<Model>();
    const char* const refusal = Refusal(parent, length, client, model.get());
    EXPECT_EQ(info.status().code(),
              refusal != nullptr ? StatusCode::kResourceExhausted : StatusCode::kOk);
    Count(refusal != nullptr ? refusal : "created");
    if (!info.ok()) return;
    model->id = info->id;
    model->client = client;
    model->last_used = clock_.Now();
    by_use_.push_back(model);
    by_age_.push_back(model);
    if (parent != nullptr) MarkUsed(parent);
  }

  // The limit that refuses the new sequence; null if none does. Gives it the parent's layers.
  const char* Refusal(const ModelPtr& parent, std::optional<uint64_t> length,
                      const std::string& client, Model* model) {
    if (parent != nullptr) ++parent->leases;
    const char* refusal = nullptr;
    while (refusal == nullptr && IdsOf(client).size() >= kClientSequences) {
      if (!EvictForOwnLimit(client)) refusal = "client_sequences";
    }
    if (refusal == nullptr && parent != nullptr) {
      model->layers = parent->layers;
      for (Layer& layer : model->layers) {
        for (HeldPage& held : layer.pages) held = Hold(held.page, client);
      }
      if (length.has_value()) Shorten(model, *length);
      while (refusal == nullptr && payments_[client] > kClientPages) {
        if (!EvictForOwnLimit(client)) refusal = "client_kv_bytes of a fork";
      }
    }
    if (parent != nullptr) --parent->leases;
    return refusal;
  }

  static void Shorten(Model* model, size_t length) {
    for (Layer& layer : model->layers) {
      layer.text.resize(length);
      layer.pages.resize(PagesFor(length));
    }
  }

  void Truncate() {
    const ModelPtr model = Any();
    if (model == nullptr) return;
    const uint64_t length = Below(model->shortest() + 1);
    EXPECT_EQ(store_->Truncate(model->id, length, {}, {model->client, {}}).status(),
              absl::OkStatus());
    Shorten(model.get(), length);
    MarkUsed(model);
  }

  void Delete() {
    const ModelPtr model = Any();
    if (model == nullptr) return;
    EXPECT_EQ(store_->Delete(model->id, {model->client, {}}), absl::OkStatus());
    Remove(model);
  }

  void Expire() {
    clock_.Advance(std::chrono::milliseconds(Below(4) * 1000));
    store_->ExpireIdle();
    for (const ModelPtr& model : std::list<ModelPtr>(by_use_)) {
      if (model->leases > 0 || clock_.Now() - model->last_used < kIdleTimeout) continue;
      Remove(model);
      Count("expired");
    }
  }

  // Leases some sequences, and launches at once or later.
  void Request() {
    Leased leased;
    leased.layer = static_cast<uint32_t>(Below(kLayers));
    for (size_t i = 1 + Below(3); i > 0; --i) {
      const ModelPtr model = Any();
      const auto& models = leased.models;
      if (model == nullptr || std::find(models.begin(), models.end(), model) != models.end()) break;
      const size_t length = model->layers[leased.layer].text.size();
      Part part{model->id,
                std::string(Below(OneIn(3) ? 200 : 8), static_cast<char>('a' + Below(26))),
                std::nullopt};
      if (OneIn(4)) part.expected_length = length;
      leased.parts.push_back(std::move(part));
      leased.models.push_back(model);
    }
    if (leased.parts.empty()) return;
    // It is shared with everybody, and changed by its owner only.
    const std::string client = leased.models[0]->client;
    for (size_t i = 0; i < leased.parts.size(); ++i) {
      if (leased.models[i]->client != client) leased.parts[i].text.clear();
    }
    leased.operation = Lease(leased.parts, leased.layer, client.c_str());
    for (const ModelPtr& model : leased.models) {
      ++model->leases;
      MarkUsed(model);
    }
    held_.push_back(std::move(leased));
    if (!OneIn(6)) End(held_.size() - 1);
  }

  // Launches the operation, or not, and ends its lease.
  void End(size_t index) {
    Leased leased = std::move(held_[index]);
    held_.erase(held_.begin() + static_cast<ptrdiff_t>(index));
    if (!OneIn(10)) LaunchIt(leased);
    leased.operation.reset();
    for (const ModelPtr& model : leased.models) {
      --model->leases;
      MarkUsed(model);
    }
  }

  void LaunchIt(const Leased& leased) {
    Prediction predicted = Predict(leased);
    const auto launch = Begin({leased.operation.get()});
    Count(absl::StatusCodeToString(predicted.code));
    if (predicted.code != StatusCode::kOk) {
      ASSERT_EQ(launch->refused.size(), 1u) << absl::StatusCodeToString(predicted.code);
      const absl::Status& refusal = launch->refused[0].second;
      EXPECT_EQ(refusal.code(), predicted.code) << refusal;
      EXPECT_THAT(std::string(refusal.message()), HasSubstr(predicted.message));
      store_->EndLaunch(*launch, true);
      return;
    }
    ASSERT_TRUE(launch->refused.empty()) << launch->refused[0].second;
    for (size_t i = 0; i < leased.parts.size(); ++i) {
      EXPECT_EQ(Text(*launch, i), predicted.layers[i].text);
    }
    const bool ok = !OneIn(8);
    store_->EndLaunch(*launch, ok);
    if (!ok) return;
    for (size_t i = 0; i < leased.parts.size(); ++i) {
      leased.models[i]->layers[leased.layer] = std::move(predicted.layers[i]);
    }
  }

  // ---- What the store must answer.

  struct Prediction {
    StatusCode code = StatusCode::kOk;
    std::string message;        // a part of it
    std::vector<Layer> layers;  // after the append, [parts]; pages that are not used are dropped
  };

  // Evictions take effect even if the operation is refused.
  Prediction Predict(const Leased& leased) {
    Prediction predicted;
    for (size_t i = 0; i < leased.parts.size(); ++i) {
      const Model& model = *leased.models[i];
      const Layer& layer = model.layers[leased.layer];
      const Part& part = leased.parts[i];
      const size_t length = layer.text.size();
      if (model.gone) {
        predicted.code = StatusCode::kNotFound;
        return predicted;
      }
      if (part.expected_length.value_or(length) != length) {
        predicted.code = StatusCode::kFailedPrecondition;
        predicted.message = absl::StrCat("the sequence has ", length, " rows");
        return predicted;
      }
      std::vector<HeldPage> added;
      const bool copies = !part.text.empty() && length % kernels::kPageTokens != 0 &&
                          layer.pages.back().page.use_count() > 1;
      const size_t kept = layer.pages.size() - copies;
      while (kept + added.size() < PagesFor(length + part.text.size())) {
        if (!Allocate(model.client, &added, &predicted)) return predicted;
      }
      Layer& after = predicted.layers.emplace_back();
      after.text = layer.text + part.text;
      after.pages.assign(layer.pages.begin(), layer.pages.begin() + static_cast<ptrdiff_t>(kept));
      after.pages.insert(after.pages.end(), added.begin(), added.end());
    }
    return predicted;
  }

  // Adds a page that `client` pays for, or refuses.
  bool Allocate(const std::string& client, std::vector<HeldPage>* added, Prediction* predicted) {
    while (payments_[client] >= kClientPages && EvictForOwnLimit(client)) continue;
    if (payments_[client] >= kClientPages) {
      predicted->code = StatusCode::kResourceExhausted;
      predicted->message = "client quota: the sequences of this client hold ";
      Count("client_kv_bytes");
      return false;
    }
    while (pages_ == kPages && EvictForAll(client)) continue;
    if (pages_ == kPages) {
      predicted->code = StatusCode::kResourceExhausted;
      predicted->message = "K/V memory is full";
      Count("full");
      return false;
    }
    added->push_back(Hold(std::make_shared<Page>(&pages_), client));
    return true;
  }

  void ExpectAgrees() {
    for (const ModelPtr& model : by_use_) {
      const auto info = store_->Get(model->id, {"alice", {}});
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_EQ(info->layer_lengths[0], model->layers[0].text.size());
      EXPECT_EQ(info->layer_lengths[1], model->layers[1].text.size());
      EXPECT_EQ(info->kv_bytes, model->pages() * kPageBytes);
      EXPECT_EQ(info->idle, model->leases > 0 ? Nanoseconds(0) : clock_.Now() - model->last_used);
    }
    for (const std::string& id : std::exchange(evicted_, {})) {
      EXPECT_FALSE(Exists(*SequenceId::FromBytes(id)));
    }
    EXPECT_EQ(store_->stats().sequences, by_use_.size());
    EXPECT_EQ(Pages(), pages_);
    EXPECT_EQ(metrics_.sequences_evicted.Value(), counts_["evicted"]);
    EXPECT_EQ(metrics_.sequences_expired.Value(), counts_["expired"]);
    for (const char* client : kClients) {
      std::vector<SequenceId> listed;
      for (const SequenceInfo& info : store_->List({client, {}}, 0, {100}).sequences) {
        listed.push_back(info.id);
      }
      EXPECT_TRUE(listed == IdsOf(client)) << client;
    }
  }

  void Count(const std::string& what) { ++counts_[what]; }

  std::mt19937 random_{TestSeed()};
  Payments payments_;              // outlives the pages
  size_t pages_ = 0;               // alive
  std::list<ModelPtr> by_use_;     // least recently used first
  std::vector<ModelPtr> by_age_;   // oldest first, also those that are gone
  std::vector<Leased> held_;       // leased and not launched
  std::set<std::string> evicted_;  // since the last comparison
  std::map<std::string, uint64_t> counts_;
};

INSTANTIATE_TEST_SUITE_P(WhenFull, SequenceLimitsTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "evicts" : "refuses"; });

TEST_P(SequenceLimitsTest, AnswersAsPredicted) {
  for (int step = 0; step < 6000 && !HasFailure(); ++step) {
    SCOPED_TRACE(absl::StrCat("step ", step));
    Step();
    ExpectAgrees();
  }
  // Otherwise the test would show less than it seems to.
  std::vector<const char*> wanted = {"created", "expired", "OK", "NOT_FOUND",
                                     "FAILED_PRECONDITION"};
  if (GetParam()) {
    wanted.insert(wanted.end(), {"evicted for the client's own limit", "a larger one gave back",
                                 "gave back for itself"});
  } else {
    wanted.insert(wanted.end(),
                  {"client_sequences", "client_kv_bytes", "full", "RESOURCE_EXHAUSTED"});
  }
  for (const char* what : wanted) EXPECT_GT(counts_[what], 0u) << what;
  EXPECT_EQ(counts_["evicted"] > 0, GetParam());
  held_.clear();
  for (const ModelPtr& model : by_use_)
    EXPECT_EQ(store_->Delete(model->id, {model->client, {}}), absl::OkStatus());
  EXPECT_EQ(Pages(), 0u);
  EXPECT_EQ(store_->stats().metadata_bytes, 0u);
}

}  // namespace
}  // namespace flashcore::server
