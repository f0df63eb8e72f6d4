#include "flashcore/c.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/cpp/local/control.h"
#include "client/cpp/local/region.h"
#include "client/cpp/local/ring.h"
#include "proto/wire/ring.h"

namespace local = flashcore::client::local;

struct flashcore_client {
  ~flashcore_client() {
    if (control != nullptr) control->RemoveEndHook(end_hook);
  }

  std::shared_ptr<local::Control> control;
  std::unique_ptr<local::Region> ring_memory;
  std::unique_ptr<local::OpenRing> open;
  uint64_t end_hook = 0;
  std::chrono::microseconds spin{};

  absl::Mutex submit_mutex;
  absl::Mutex receive_mutex;
  std::vector<uint8_t> response ABSL_GUARDED_BY(receive_mutex);  // of the last completion
  absl::Mutex mutex;
  std::map<std::string, std::unique_ptr<local::Region>> regions ABSL_GUARDED_BY(mutex);  // by id
};

namespace {

constexpr char kScheme[] = "local:";
constexpr flashcore_options kDefaults = {64, 16384, 30'000'000'000, 50};

thread_local std::string last_error;

int Fail(const absl::Status& status) {
  last_error = std::string(status.message());
  return static_cast<int>(status.code());
}

int FailArgument(absl::string_view problem) { return Fail(absl::InvalidArgumentError(problem)); }

absl::Time Deadline(int64_t timeout_ns) {
  return timeout_ns < 0 ? absl::InfiniteFuture() : absl::Now() + absl::Nanoseconds(timeout_ns);
}

// INVALID_ARGUMENT unless the server would open such a ring.
absl::Status CheckRing(uint32_t slots, uint32_t slot_bytes) {
  if (slots == 0 || slots > flashcore::wire::kMaxSlots || (slots & (slots - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots: ", slots, "; want a power of two, 1 to ", flashcore::wire::kMaxSlots));
  }
  if (slot_bytes < flashcore::wire::kMinSlotBytes || slot_bytes > flashcore::wire::kMaxSlotBytes ||
      slot_bytes % flashcore::wire::kRingAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slot_bytes: ", slot_bytes, "; want a multiple of ", flashcore::wire::kRingAlignment, ", ",
        flashcore::wire::kMinSlotBytes, " to ", flashcore::wire::kMaxSlotBytes));
  }
  return absl::OkStatus();
}

absl::Status Connect(absl::string_view target, const char* name, const flashcore_options& options,
                     flashcore_client* client) {
  if (!absl::ConsumePrefix(&target, kScheme)) {
    return absl::InvalidArgumentError(absl::StrCat("target '", target, "': want local:/path"));
  }
  absl::Status status = local::CheckPath(target);
  status.Update(CheckRing(options.slots, options.slot_bytes));
  if (!status.ok()) return status;
  const absl::Time deadline = Deadline(options.timeout_ns);
  auto control = local::Control::Connect(
      std::string(target), absl::StrCat("flashcore-c ", name == nullptr ? "" : name), deadline);
  if (!control.ok()) return control.status();
  auto memory =
      local::Region::Create(flashcore::wire::RingBytes(options.slots, options.slot_bytes));
  if (!memory.ok()) return memory.status();
  const auto id = (*control)->Register((*memory)->fd(), (*memory)->bytes(), false, deadline);
  if (!id.ok()) return id.status();
  auto ring = local::OpenRing::Open(*control, (*memory)->data(), *id, /*offset=*/0, options.slots,
                                    options.slot_bytes, deadline);
  if (!ring.ok()) return ring.status();
  client->ring_memory = *std::move(memory);
  client->control = *std::move(control);
  client->open = *std::move(ring);
  client->spin = std::chrono::microseconds(options.spin_us);
  client->end_hook =
      client->control->AddEndHook([opened = client->open.get()] { opened->ring().Wake(); });
  return absl::OkStatus();
}

// Takes a completion if there is one.
int Take(flashcore_client* client, flashcore_completion* completion)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(client->receive_mutex) {
  local::Ring& ring = client->open->ring();
  local::Ring::Answer answer;
  if (!ring.Poll(&answer)) {
    return client->control->ended() ? Fail(client->control->end_status()) : FLASHCORE_AGAIN;
  }
  if (answer.malformed) {
    const absl::Status status = absl::InternalError("reply: malformed completion");
    client->control->Abort(status);
    return Fail(status);
  }
  // A copy, so that the slot is free for the next answer.
  const auto* const data = reinterpret_cast<const uint8_t*>(answer.message.data());
  client->response.assign(data, data + answer.message.size());
  ring.Pop();
  *completion = {answer.tag, client->response.data(), client->response.size()};
  return FLASHCORE_OK;
}

}  // namespace

int flashcore_connect(const char* target, const char* name, const flashcore_options* options,
                      flashcore_client** client) {
  if (client == nullptr) return FailArgument("client: null");
  *client = nullptr;
  if (target == nullptr) return FailArgument("target: null");
  flashcore_options all = options == nullptr ? kDefaults : *options;
  if (all.slots == 0) all.slots = kDefaults.slots;
  if (all.slot_bytes == 0) all.slot_bytes = kDefaults.slot_bytes;
  auto made = std::make_unique<flashcore_client>();
  const absl::Status status = Connect(target, name, all, made.get());
  if (!status.ok()) return Fail(status);
  *client = made.release();
  return FLASHCORE_OK;
}

void flashcore_close(flashcore_client* client) { delete client; }

const char* flashcore_identity(const flashcore_client* client) {
  return client == nullptr ? "" : client->control->identity().c_str();
}

int flashcore_register_memory(flashcore_client* client, uint64_t bytes, int read_only,
                              int64_t timeout_ns, flashcore_memory* memory) {
  if (client == nullptr || memory == nullptr) return FailArgument("client or memory: null");
  auto region = local::Region::Create(bytes);
  if (!region.ok()) return Fail(region.status());
  const auto id = client->control->Register((*region)->fd(), (*region)->bytes(), read_only != 0,
                                            Deadline(timeout_ns));
  if (!id.ok()) return Fail(id.status());
  *memory = {(*region)->data(), (*region)->bytes(), {}};
  if (id->size() != sizeof(memory->region_id)) {
    return Fail(absl::InternalError(absl::StrCat("reply: a region_id of ", id->size(), " bytes")));
  }
  std::memcpy(memory->region_id, id->data(), id->size());
  absl::MutexLock lock(&client->mutex);
  client->regions[*id] = *std::move(region);
  return FLASHCORE_OK;
}

int flashcore_unregister_memory(flashcore_client* client, const uint8_t region_id[16]) {
  if (client == nullptr || region_id == nullptr) return FailArgument("client or region_id: null");
  const std::string id(reinterpret_cast<const char*>(region_id), 16);
  absl::MutexLock lock(&client->mutex);
  if (client->regions.erase(id) == 0) return Fail(absl::NotFoundError("region_id: unknown"));
  client->control->Unregister(id);
  return FLASHCORE_OK;
}

int flashcore_call(flashcore_client* client, const char* method, const void* request,
                   uint64_t request_bytes, int64_t timeout_ns, flashcore_bytes* response) {
  if (client == nullptr || method == nullptr || response == nullptr ||
      (request == nullptr && request_bytes > 0)) {
    return FailArgument("client, method, request or response: null");
  }
  *response = {nullptr, 0};
  std::string message(static_cast<const char*>(request), request_bytes);
  const auto reply = client->control->Call(method, std::move(message), Deadline(timeout_ns));
  if (!reply.ok()) return Fail(reply.status());
  if (reply->empty()) return FLASHCORE_OK;
  auto* const data = static_cast<uint8_t*>(std::malloc(reply->size()));
  if (data == nullptr) return Fail(absl::ResourceExhaustedError("malloc"));
  std::copy(reply->begin(), reply->end(), data);
  *response = {data, reply->size()};
  return FLASHCORE_OK;
}

void flashcore_free(flashcore_bytes* bytes) {
  if (bytes == nullptr) return;
  std::free(bytes->data);
  *bytes = {nullptr, 0};
}

int flashcore_submit(flashcore_client* client, uint64_t tag, const void* request,
                     uint64_t request_bytes, int64_t timeout_ns) {
  if (client == nullptr || (request == nullptr && request_bytes > 0)) {
    return FailArgument("client or request: null");
  }
  if (client->control->ended()) return Fail(client->control->end_status());
  absl::MutexLock lock(&client->submit_mutex);
  local::Ring& ring = client->open->ring();
  if (request_bytes > ring.RequestBytes()) {
    return Fail(absl::ResourceExhaustedError(absl::StrCat(
        "request: ", request_bytes, " bytes, over the ", ring.RequestBytes(), " of a slot")));
  }
  if (ring.Full()) return FLASHCORE_AGAIN;
  if (request_bytes > 0) std::memcpy(ring.NextSlot(), request, request_bytes);
  // 0 would be no timeout.
  const auto timeout = timeout_ns < 0 ? 0 : std::max<int64_t>(1, timeout_ns);
  client->open->Submit(tag, static_cast<uint64_t>(timeout), request_bytes);
  return FLASHCORE_OK;
}

int flashcore_poll(flashcore_client* client, flashcore_completion* completion) {
  if (client == nullptr || completion == nullptr) return FailArgument("client, completion: null");
  absl::MutexLock lock(&client->receive_mutex);
  return Take(client, completion);
}

int flashcore_wait(flashcore_client* client, int64_t timeout_ns, flashcore_completion* completion) {
  if (client == nullptr || completion == nullptr) return FailArgument("client, completion: null");
  absl::MutexLock lock(&client->receive_mutex);
  client->open->ring().Wait(client->control->ended(),
                            std::chrono::steady_clock::now() + client->spin,
                            local::ToSteady(Deadline(timeout_ns)));
  return Take(client, completion);
}

int flashcore_cancel(flashcore_client* client, uint64_t tag) {
  if (client == nullptr) return FailArgument("client: null");
  if (client->control->ended()) return Fail(client->control->end_status());
  client->open->Cancel(tag);
  return FLASHCORE_OK;
}

const char* flashcore_last_error(void) { return last_error.c_str(); }
