#include "flashcore/c.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/local/connection.h"
#include "client/local/device_memory.h"
#include "client/local/fields.h"
#include "client/local/memory.h"
#include "client/local/process.h"
#include "client/local/receiver.h"
#include "client/local/ring.h"
#include "client/local/status.h"
#include "client/local/timeline.h"
#include "proto/wire/ring.h"

namespace local = flashcore::client::local;
namespace wire = flashcore::wire;
using local::Status;
using local::SteadyTime;

struct flashcore_client {
  ~flashcore_client() {
    if (connection == nullptr) return;
    connection->End({local::kCancelled, "the client was closed", ""});  // which ends the receiver
    receiver.reset();
  }

  const local::Process process;
  std::map<std::string, local::Memory> regions;  // by id
  std::map<std::string, local::DeviceMemory> device_regions;
  local::Memory ring_memory;
  std::shared_ptr<local::Connection> connection;
  std::unique_ptr<local::OpenRing> ring;
  std::chrono::microseconds spin{};
  std::unique_ptr<local::Receiver> receiver;  // null: flashcore_wait receives
  std::unique_ptr<local::Timelines> timelines;

  std::mutex mutex;               // of regions and device_regions
  std::mutex submit_mutex;        // of the ring's side that submits, and of timelines' Order
  std::mutex receive_mutex;       // of its other side, receiver and response
  std::vector<uint8_t> response;  // of the last completion
};

namespace {

constexpr char kScheme[] = "local:";
constexpr flashcore_options kDefaults = {64, 16384, 30'000'000'000, 50};

thread_local std::string last_error;
thread_local std::string last_status;

int Fail(const Status& status) {
  last_error = status.message;
  last_status = status.encoded.empty() ? local::Writer()
                                             .Number(1, static_cast<uint64_t>(status.code))
                                             .Bytes(2, status.message)
                                             .message()
                                       : status.encoded;
  return status.code;
}

int FailArgument(const std::string& problem) {
  return Fail({local::kInvalidArgument, problem, ""});
}

// In a child that was forked from the process of the client.
int FailProcess(const flashcore_client& client) {
  return Fail({local::kFailedPrecondition, client.process.Refusal(), ""});
}

Status TooLate() { return {local::kDeadlineExceeded, "the deadline has passed", ""}; }

SteadyTime Deadline(int64_t timeout_ns) {
  constexpr int64_t kYear = int64_t{365} * 24 * 3600 * 1'000'000'000;
  return timeout_ns < 0 || timeout_ns > kYear
             ? SteadyTime::max()
             : std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
}

// INVALID_ARGUMENT unless the server would open such a ring.
Status CheckRing(uint32_t slots, uint32_t slot_bytes) {
  if (slots == 0 || slots > wire::kMaxSlots || (slots & (slots - 1)) != 0) {
    return {local::kInvalidArgument,
            "slots: " + std::to_string(slots) + "; want a power of two, 1 to " +
                std::to_string(wire::kMaxSlots),
            ""};
  }
  if (slot_bytes < wire::kMinSlotBytes || slot_bytes > wire::kMaxSlotBytes ||
      slot_bytes % wire::kRingAlignment != 0) {
    return {local::kInvalidArgument,
            "slot_bytes: " + std::to_string(slot_bytes) + "; want a multiple of " +
                std::to_string(wire::kRingAlignment) + ", " + std::to_string(wire::kMinSlotBytes) +
                " to " + std::to_string(wire::kMaxSlotBytes),
            ""};
  }
  return {};
}

// The path of a target.
Status PathOf(std::string_view target, std::string* path) {
  if (target.substr(0, sizeof(kScheme) - 1) != kScheme) {
    return {local::kInvalidArgument, "target '" + std::string(target) + "': want local:/path", ""};
  }
  *path = std::string(target.substr(sizeof(kScheme) - 1));
  return local::CheckPath(*path);
}

Status OpenRing(const flashcore_options& options, SteadyTime deadline, flashcore_client* client) {
  std::string id;
  Status status = local::Memory::Create(wire::RingBytes(options.slots, options.slot_bytes),
                                        &client->ring_memory);
  if (status.ok()) {
    status = client->connection->Register(client->ring_memory, /*read_only=*/false, deadline, &id);
  }
  if (!status.ok()) return status;
  return local::OpenRing::Open(client->connection, client->ring_memory.data(), id, /*offset=*/0,
                               options.slots, options.slot_bytes, deadline, &client->ring);
}

Status Connect(std::string_view target, const char* name, const flashcore_options& options,
               flashcore_client* client) {
  std::string path;
  Status status = PathOf(target, &path);
  if (status.ok()) status = CheckRing(options.slots, options.slot_bytes);
  if (status.ok() && options.timeout_ns == 0) status = TooLate();
  if (status.ok()) status = local::Connection::Connect(path, &client->connection);
  if (!status.ok()) return status;
  const SteadyTime deadline = Deadline(options.timeout_ns);
  status = client->connection->Hello(std::string("flashcore-c ") + (name == nullptr ? "" : name),
                                     deadline);
  if (status.ok()) status = OpenRing(options, deadline, client);
  if (!status.ok()) return {status.code, std::string(target) + ": " + status.message, ""};
  client->spin = std::chrono::microseconds(options.spin_us);
  client->connection->AddEndHook([ring = client->ring.get()] {
    ring->ring().Wake();
    return false;
  });
  client->timelines = std::make_unique<local::Timelines>(client->connection);
  return {};
}

// Takes a completion if there is one. With receive_mutex.
int Take(flashcore_client* client, flashcore_completion* completion) {
  const bool ended = client->connection->ended();
  uint64_t tag = 0;
  const bool taken =
      client->receiver != nullptr
          ? client->receiver->Take(&tag, &client->response)
          : local::TakeAnswer(client->ring->ring(), *client->connection, &tag, &client->response);
  if (!taken) return ended ? Fail(client->connection->end_status()) : FLASHCORE_AGAIN;
  *completion = {tag, client->response.data(), client->response.size()};
  return FLASHCORE_OK;
}

int CheckSubmit(const flashcore_client* client, const void* request, uint64_t request_bytes,
                int64_t timeout_ns) {
  if (client == nullptr || (request == nullptr && request_bytes > 0)) {
    return FailArgument("client or request: null");
  }
  if (!client->process.Here()) return FailProcess(*client);
  return timeout_ns == 0 ? Fail(TooLate()) : FLASHCORE_OK;
}

// Submits in the order of the stream `*stream`; null: at once.
int Submit(flashcore_client* client, uint64_t tag, const void* request, uint64_t request_bytes,
           int64_t timeout_ns, void* const* stream) {
  const std::lock_guard<std::mutex> lock(client->submit_mutex);
  if (client->connection->ended()) return Fail(client->connection->end_status());
  local::Ring& ring = client->ring->ring();
  const uint64_t most =
      ring.RequestBytes() - (stream == nullptr ? 0 : local::Timelines::kMaxFieldBytes);
  if (request_bytes > most) {
    return Fail({local::kResourceExhausted,
                 "request: " + std::to_string(request_bytes) + " bytes, over the " +
                     std::to_string(most) + " of a slot",
                 ""});
  }
  if (ring.Full()) return FLASHCORE_AGAIN;
  std::byte* const slot = ring.NextSlot();
  if (request_bytes > 0) std::memcpy(slot, request, request_bytes);
  if (stream != nullptr) {
    std::string_view fields;
    const Status status = client->timelines->Order(*stream, &fields);
    if (!status.ok()) return Fail(status);
    std::memcpy(slot + request_bytes, fields.data(), fields.size());
    request_bytes += fields.size();
  }
  const auto timeout = static_cast<uint64_t>(std::max<int64_t>(0, timeout_ns));  // 0: none
  client->ring->Submit(tag, timeout, request_bytes);
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
  const Status status = Connect(target, name, all, made.get());
  if (!status.ok()) return Fail(status);
  *client = made.release();
  return FLASHCORE_OK;
}

void flashcore_close(flashcore_client* client) {
  if (client != nullptr && client->process.Here()) delete client;
}

void flashcore_shutdown(flashcore_client* client) {
  if (client == nullptr || !client->process.Here()) return;
  client->connection->End({local::kCancelled, "the client was shut down", ""});
}

int flashcore_ended(const flashcore_client* client) {
  return client != nullptr && (!client->process.Here() || client->connection->ended()) ? 1 : 0;
}

const char* flashcore_identity(const flashcore_client* client) {
  return client == nullptr ? "" : client->connection->identity().c_str();
}

int flashcore_register_memory(flashcore_client* client, uint64_t bytes, int read_only,
                              int64_t timeout_ns, flashcore_memory* memory) {
  if (client == nullptr || memory == nullptr) return FailArgument("client or memory: null");
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  local::Memory made;
  Status status = local::Memory::Create(bytes, &made);
  std::string id;
  if (status.ok()) {
    status = client->connection->Register(made, read_only != 0, Deadline(timeout_ns), &id);
  }
  if (!status.ok()) return Fail(status);
  *memory = {made.data(), made.bytes(), {}};
  std::memcpy(memory->region_id, id.data(), id.size());
  const std::lock_guard<std::mutex> lock(client->mutex);
  client->regions[id] = std::move(made);
  return FLASHCORE_OK;
}

int flashcore_allocate_device_memory(flashcore_client* client, uint64_t bytes,
                                     const char* device_id, int64_t timeout_ns,
                                     flashcore_device_memory* memory) {
  if (client == nullptr || memory == nullptr) return FailArgument("client or memory: null");
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  local::DeviceMemory made;
  const Status status = local::DeviceMemory::Allocate(client->connection.get(), bytes,
                                                      device_id == nullptr ? "" : device_id,
                                                      Deadline(timeout_ns), &made);
  if (!status.ok()) return Fail(status);
  const std::string id = made.region_id();
  *memory = {made.address(), made.bytes(), made.ordinal(), {}};
  std::memcpy(memory->region_id, id.data(), id.size());
  const std::lock_guard<std::mutex> lock(client->mutex);
  client->device_regions[id] = std::move(made);
  return FLASHCORE_OK;
}

int flashcore_unregister_memory(flashcore_client* client, const uint8_t region_id[16]) {
  if (client == nullptr || region_id == nullptr) return FailArgument("client or region_id: null");
  if (!client->process.Here()) return FailProcess(*client);
  const std::string id(reinterpret_cast<const char*>(region_id), 16);
  const std::lock_guard<std::mutex> lock(client->mutex);
  if (client->regions.erase(id) + client->device_regions.erase(id) == 0) {
    return Fail({local::kNotFound, "region_id: unknown", ""});
  }
  client->connection->Unregister(id);
  return FLASHCORE_OK;
}

int flashcore_call(flashcore_client* client, const char* method, const void* request,
                   uint64_t request_bytes, int64_t timeout_ns, flashcore_bytes* response) {
  if (client == nullptr || method == nullptr || response == nullptr ||
      (request == nullptr && request_bytes > 0)) {
    return FailArgument("client, method, request or response: null");
  }
  *response = {nullptr, 0};
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  std::string result;
  const Status status = client->connection->Call(
      method, {static_cast<const char*>(request), request_bytes}, Deadline(timeout_ns), &result);
  if (!status.ok()) return Fail(status);
  if (result.empty()) return FLASHCORE_OK;
  auto* const data = static_cast<uint8_t*>(std::malloc(result.size()));
  if (data == nullptr) return Fail({local::kResourceExhausted, "malloc", ""});
  std::copy(result.begin(), result.end(), data);
  *response = {data, result.size()};
  return FLASHCORE_OK;
}

void flashcore_free(flashcore_bytes* bytes) {
  if (bytes == nullptr) return;
  std::free(bytes->data);
  *bytes = {nullptr, 0};
}

int flashcore_submit(flashcore_client* client, uint64_t tag, const void* request,
                     uint64_t request_bytes, int64_t timeout_ns) {
  const int refused = CheckSubmit(client, request, request_bytes, timeout_ns);
  if (refused != FLASHCORE_OK) return refused;
  return Submit(client, tag, request, request_bytes, timeout_ns, /*stream=*/nullptr);
}

int flashcore_submit_on_stream(flashcore_client* client, uint64_t tag, const void* request,
                               uint64_t request_bytes, int64_t timeout_ns, void* stream) {
  const int refused = CheckSubmit(client, request, request_bytes, timeout_ns);
  if (refused != FLASHCORE_OK) return refused;
  const Status status = client->timelines->Open(stream, Deadline(timeout_ns));
  if (!status.ok()) return Fail(status);
  return Submit(client, tag, request, request_bytes, timeout_ns, &stream);
}

int flashcore_poll(flashcore_client* client, flashcore_completion* completion) {
  if (client == nullptr || completion == nullptr) return FailArgument("client, completion: null");
  if (!client->process.Here()) return FailProcess(*client);
  const std::lock_guard<std::mutex> lock(client->receive_mutex);
  return Take(client, completion);
}

int flashcore_wait(flashcore_client* client, int64_t timeout_ns, flashcore_completion* completion) {
  if (client == nullptr || completion == nullptr) return FailArgument("client, completion: null");
  if (!client->process.Here()) return FailProcess(*client);
  const std::lock_guard<std::mutex> lock(client->receive_mutex);
  if (client->receiver != nullptr) {
    return Fail({local::kFailedPrecondition, "flashcore_wait after flashcore_event_fd: poll", ""});
  }
  client->ring->ring().Wait(client->connection->ended(),
                            std::chrono::steady_clock::now() + client->spin, Deadline(timeout_ns));
  return Take(client, completion);
}

int flashcore_event_fd(flashcore_client* client, int* fd) {
  if (client == nullptr || fd == nullptr) return FailArgument("client, fd: null");
  if (!client->process.Here()) return FailProcess(*client);
  const std::lock_guard<std::mutex> lock(client->receive_mutex);
  if (client->receiver == nullptr) {
    const Status status = local::Receiver::Start(client->connection.get(), &client->ring->ring(),
                                                 client->spin, &client->receiver);
    if (!status.ok()) return Fail(status);
  }
  *fd = client->receiver->fd();
  return FLASHCORE_OK;
}

int flashcore_cancel(flashcore_client* client, uint64_t tag) {
  if (client == nullptr) return FailArgument("client: null");
  if (!client->process.Here()) return FailProcess(*client);
  if (client->connection->ended()) return Fail(client->connection->end_status());
  client->ring->Cancel(tag);
  return FLASHCORE_OK;
}

const char* flashcore_last_error(void) { return last_error.c_str(); }

const uint8_t* flashcore_last_status(uint64_t* size) {
  if (size != nullptr) *size = last_status.size();
  return reinterpret_cast<const uint8_t*>(last_status.data());
}
