#include "server/memory/region_budget.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

absl::Status AllFull(absl::string_view what, size_t more, size_t limit) {
  return WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                      what, ": ", more, " in addition to those of all clients; at most ", limit,
                      " are allowed, and no client has more than this one would")),
                  reason::kServerFull);
}

absl::Status ClientFull(absl::string_view message, absl::string_view limit, size_t needed,
                        size_t used, size_t allowed) {
  return WithInfo(absl::ResourceExhaustedError(message), reason::kQuotaExceeded,
                  {{"limit", limit}, {"needed", needed}, {"used", used}, {"allowed", allowed}});
}

}  // namespace

RegionBudget::RegionBudget(const Options& options, const Names& names, Gauge* bytes, Gauge* regions)
    : options_(options),
      names_(names),
      bytes_gauge_(bytes),
      regions_gauge_(regions),
      bytes_({options.total_bytes, options.client_bytes}),
      regions_({options.total_regions, options.client_regions}) {}

absl::StatusOr<std::shared_ptr<const SharedRegion>> RegionBudget::Share(
    size_t bytes, const std::string& client, OnGiveBack on_give_back,
    absl::FunctionRef<absl::StatusOr<Region>()> make) {
  auto use = std::make_unique<Use>();
  use->client_name = client;
  use->bytes = bytes;
  use->on_give_back = std::move(on_give_back);
  std::vector<OnGiveBack> ended;
  const absl::Status acquired = Acquire(use.get(), &ended);
  for (OnGiveBack& end : ended) end();
  if (!acquired.ok()) return acquired;
  absl::StatusOr<Region> region = make();
  if (!region.ok()) {
    Release(use.get());
    return region.status();
  }
  const auto release = [this, use = use.release()](const SharedRegion* gone) {
    delete gone;
    Release(use);
    delete use;
  };
  return std::shared_ptr<const SharedRegion>(region->release(), release);
}

absl::Status RegionBudget::CheckOwnLimits(const std::string& client, size_t bytes) const {
  for (const size_t limit : {options_.total_bytes, options_.client_bytes}) {
    if (limit == 0 || bytes <= limit) continue;
    return WithTooLarge(absl::ResourceExhaustedError(absl::StrCat(
                            "bytes: ", bytes, " in one region; at most ", limit, " are allowed ",
                            limit == options_.total_bytes ? "of all clients" : "per client")),
                        bytes, limit);
  }
  if (bytes_.IsOverShare(client, bytes)) {
    const size_t used = bytes_.held(client), allowed = options_.client_bytes;
    return ClientFull(absl::StrCat("bytes: ", bytes, " in addition to the client's ", used,
                                   "; at most ", allowed, " are allowed per client"),
                      names_.client_bytes, bytes, used, allowed);
  }
  if (regions_.IsOverShare(client, 1)) {
    const size_t used = regions_.held(client), allowed = options_.client_regions;
    return ClientFull(absl::StrCat("the client has ", used, " regions of ", names_.memory,
                                   "; at most ", allowed, " are allowed per client"),
                      names_.client_regions, 1, used, allowed);
  }
  return absl::OkStatus();
}

absl::Status RegionBudget::Acquire(Use* use, std::vector<OnGiveBack>* ended) {
  MutexLock lock(&mutex_);
  if (absl::Status status = CheckOwnLimits(use->client_name, use->bytes); !status.ok())
    return status;
  Take(use);
  std::vector<Use*> given;
  if (absl::Status status = MakeRoom(*use, &given); !status.ok()) {
    Give(use);
    for (auto one = given.rbegin(); one != given.rend(); ++one) Take(*one);  // the oldest first
    return status;
  }
  for (Use* one : given) {
    leaving_bytes_ += one->bytes;
    ++leaving_regions_;
    if (one->on_give_back != nullptr) ended->push_back(std::move(one->on_give_back));
  }
  bytes_gauge_->Increment(static_cast<double>(use->bytes));
  regions_gauge_->Increment();
  return absl::OkStatus();
}

absl::Status RegionBudget::MakeRoom(const Use& newcomer, std::vector<Use*>* given) {
  for (const Shares* shares : {&bytes_, &regions_}) {
    while (const Shares::Client* const client = shares->MustGiveBack()) {
      if (client->held <= shares->held(newcomer.client_name)) {
        return shares == &bytes_ ? AllFull("bytes", newcomer.bytes, options_.total_bytes)
                                 : AllFull("regions", 1, options_.total_regions);
      }
      given->push_back(GiveNewest(client->name));
    }
  }
  if (given->empty()) return absl::OkStatus();
  size_t bytes = leaving_bytes_;
  for (const Use* one : *given) bytes += one->bytes;
  const size_t regions = leaving_regions_ + given->size();
  if (bytes <= options_.total_bytes && regions <= options_.total_regions) return absl::OkStatus();
  return WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                      names_.memory, ": ", leaving_bytes_, " bytes in ", leaving_regions_,
                      " regions that clients had to give back are still in use")),
                  reason::kServerFull);
}

RegionBudget::Use* RegionBudget::GiveNewest(const std::string& client) {
  auto* const newest = static_cast<Use*>(bytes_.clients().find(client)->second.newest);
  Give(newest);
  return newest;
}

void RegionBudget::Take(Use* use) {
  bytes_.Take(use->client_name, use->bytes, use);
  use->regions = regions_.Take(use->client_name, 1);
}

void RegionBudget::Give(Use* use) {
  bytes_.Give(use);
  regions_.Give(use->regions, 1);
}

void RegionBudget::Release(Use* use) {
  MutexLock lock(&mutex_);
  if (use->client != nullptr) {
    Give(use);
  } else {  // it was given back
    leaving_bytes_ -= use->bytes;
    --leaving_regions_;
  }
  bytes_gauge_->Decrement(static_cast<double>(use->bytes));
  regions_gauge_->Decrement();
}

}  // namespace flashcore::server
