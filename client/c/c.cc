#include "flashcore/c.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

#include "client/c/connection.h"
#include "client/c/fields.h"
#include "client/c/memory.h"
#include "client/c/receiver.h"
#include "client/c/status.h"
#include "client/cpp/local/process.h"
#include "client/cpp/local/ring.h"
#include "proto/wire/ring.h"

namespace c = flashcore::c;
namespace wire = flashcore::wire;
using flashcore::client::local::Process;
using flashcore::client::local::Ring;

struct flashcore_client {
  ~flashcore_client() {
    if (connection == nullptr) return;
    connection->End({c::kCancelled, "the client was closed", ""});  // which ends the receiver
    receiver.reset();
  }

  const Process process;
  std::map<std::string, c::Memory> regions;  // by id
  c::Memory ring_memory;
  std::unique_ptr<Ring> ring;
  c::File doorbell;
  uint64_t ring_number = 0;
  std::string identity;
  std::chrono::microseconds spin{};
  std::unique_ptr<c::Connection> connection;
  std::unique_ptr<c::Receiver> receiver;  // null: flashcore_wait receives

  std::mutex mutex;               // of regions
  std::mutex submit_mutex;        // of the ring's side that submits
  std::mutex receive_mutex;       // of its other side, receiver and response
  std::vector<uint8_t> response;  // of the last completion
};

namespace {

constexpr char kScheme[] = "local:";
constexpr flashcore_options kDefaults = {64, 16384, 30'000'000'000, 50};

// Fields of LocalRequest.
enum Action : uint32_t {
  kHello = 2,
  kRegister = 3,
  kUnregister = 4,
  kOpenRing = 5,
  kCall = 7,
  kCancel = 9,
};

thread_local std::string last_error;
thread_local std::string last_status;

int Fail(const c::Status& status) {
  last_error = status.message;
  last_status = status.encoded.empty() ? c::Writer()
                                             .Number(1, static_cast<uint64_t>(status.code))
                                             .Bytes(2, status.message)
                                             .message()
                                       : status.encoded;
  return status.code;
}

int FailArgument(const std::string& problem) { return Fail({c::kInvalidArgument, problem, ""}); }

// In a child that was forked from the process of the client.
int FailProcess(const flashcore_client& client) {
  return Fail({c::kFailedPrecondition, client.process.Refusal(), ""});
}

c::Status TooLate() { return {c::kDeadlineExceeded, "the deadline has passed", ""}; }

c::Clock::time_point Deadline(int64_t timeout_ns) {
  constexpr int64_t kYear = int64_t{365} * 24 * 3600 * 1'000'000'000;
  return timeout_ns < 0 || timeout_ns > kYear
             ? c::Clock::time_point::max()
             : c::Clock::now() + std::chrono::nanoseconds(timeout_ns);
}

// INVALID_ARGUMENT unless the server would open such a ring.
c::Status CheckRing(uint32_t slots, uint32_t slot_bytes) {
  if (slots == 0 || slots > wire::kMaxSlots || (slots & (slots - 1)) != 0) {
    return {c::kInvalidArgument,
            "slots: " + std::to_string(slots) + "; want a power of two, 1 to " +
                std::to_string(wire::kMaxSlots),
            ""};
  }
  if (slot_bytes < wire::kMinSlotBytes || slot_bytes > wire::kMaxSlotBytes ||
      slot_bytes % wire::kRingAlignment != 0) {
    return {c::kInvalidArgument,
            "slot_bytes: " + std::to_string(slot_bytes) + "; want a multiple of " +
                std::to_string(wire::kRingAlignment) + ", " + std::to_string(wire::kMinSlotBytes) +
                " to " + std::to_string(wire::kMaxSlotBytes),
            ""};
  }
  return {};
}

// The path of a target.
c::Status PathOf(std::string_view target, std::string* path) {
  const std::string text = "target '" + std::string(target) + "': ";
  if (target.substr(0, sizeof(kScheme) - 1) != kScheme) {
    return {c::kInvalidArgument, text + "want local:/path", ""};
  }
  *path = std::string(target.substr(sizeof(kScheme) - 1));
  if (!path->empty() && path->front() == '/') return {};
  return {c::kInvalidArgument,
          text + (path->empty() ? "no path" : "the path is not absolute") +
              "; want local:/path of the server's socket",
          ""};
}

c::Status Hello(const char* name, c::Clock::time_point deadline, flashcore_client* client) {
  constexpr uint32_t kMinVersion = 1, kMaxVersion = 2, kClient = 3;  // of LocalHello
  constexpr uint32_t kVersion = 1, kIdentity = 2;                    // of LocalHelloResult
  c::Writer hello;
  hello.Number(kMinVersion, wire::kLocalVersion).Number(kMaxVersion, wire::kLocalVersion);
  hello.Bytes(kClient, std::string("flashcore-c ") + (name == nullptr ? "" : name));
  c::Reply reply;
  c::Status status = client->connection->Exchange(kHello, hello.message(), -1, deadline, &reply);
  if (!status.ok()) return status;
  uint64_t version = 0;
  c::Reader result(reply.result);
  while (result.Next()) {
    if (result.field() == kVersion) version = result.number();
    if (result.field() == kIdentity) client->identity = std::string(result.bytes());
  }
  if (version == wire::kLocalVersion) return {};
  return {c::kInternal, "reply: version " + std::to_string(version) + " of the local protocol", ""};
}

c::Status Register(c::Connection& connection, const c::Memory& memory, bool read_only,
                   c::Clock::time_point deadline, std::string* region_id) {
  constexpr uint32_t kBytes = 1, kReadOnly = 2, kRegionId = 1;
  c::Writer action;
  action.Number(kBytes, memory.bytes()).Number(kReadOnly, read_only ? 1 : 0);
  c::Reply reply;
  c::Status status =
      connection.Exchange(kRegister, action.message(), memory.file(), deadline, &reply);
  if (!status.ok()) return status;
  c::Reader result(reply.result);
  while (result.Next()) {
    if (result.field() == kRegionId) *region_id = std::string(result.bytes());
  }
  if (region_id->size() == sizeof(flashcore_memory::region_id)) return {};
  return {c::kInternal, "reply: a region_id of " + std::to_string(region_id->size()) + " bytes",
          ""};
}

c::Status OpenRing(const flashcore_options& options, c::Clock::time_point deadline,
                   flashcore_client* client) {
  constexpr uint32_t kRegionId = 1, kSlots = 3, kSlotBytes = 4, kRing = 1;
  c::Status status =
      c::Memory::Create(wire::RingBytes(options.slots, options.slot_bytes), &client->ring_memory);
  std::string id;
  if (status.ok())
    status = Register(*client->connection, client->ring_memory, false, deadline, &id);
  if (!status.ok()) return status;
  c::Writer action;
  action.Bytes(kRegionId, id).Number(kSlots, options.slots).Number(kSlotBytes, options.slot_bytes);
  c::Reply reply;
  status = client->connection->Exchange(kOpenRing, action.message(), -1, deadline, &reply);
  if (!status.ok()) return status;
  c::Reader result(reply.result);
  while (result.Next()) {
    if (result.field() == kRing) client->ring_number = result.number();
  }
  client->doorbell = std::move(reply.file);
  if (client->doorbell.get() < 0) return {c::kInternal, "reply: no doorbell", ""};
  client->ring = std::make_unique<Ring>(static_cast<std::byte*>(client->ring_memory.data()),
                                        options.slots, options.slot_bytes);
  return {};
}

c::Status Connect(std::string_view target, const char* name, const flashcore_options& options,
                  flashcore_client* client) {
  std::string path;
  c::Status status = PathOf(target, &path);
  if (status.ok()) status = CheckRing(options.slots, options.slot_bytes);
  if (status.ok() && options.timeout_ns == 0) status = TooLate();
  if (status.ok()) status = c::Connection::Connect(path, &client->connection);
  if (!status.ok()) return status;
  const c::Clock::time_point deadline = Deadline(options.timeout_ns);
  status = Hello(name, deadline, client);
  if (status.ok()) status = OpenRing(options, deadline, client);
  if (!status.ok()) {
    status.message = std::string(target) + ": " + status.message;
    status.encoded.clear();
    return status;
  }
  client->spin = std::chrono::microseconds(options.spin_us);
  client->connection->OnEnd([ring = client->ring.get()] { ring->Wake(); });
  return {};
}

// Takes a completion if there is one. With receive_mutex.
int Take(flashcore_client* client, flashcore_completion* completion) {
  const bool ended = client->connection->ended();
  uint64_t tag = 0;
  const bool taken = client->receiver != nullptr ? client->receiver->Take(&tag, &client->response)
                                                 : c::TakeAnswer(*client->ring, *client->connection,
                                                                 &tag, &client->response);
  if (!taken) return ended ? Fail(client->connection->end_status()) : FLASHCORE_AGAIN;
  *completion = {tag, client->response.data(), client->response.size()};
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
  const c::Status status = Connect(target, name, all, made.get());
  if (!status.ok()) return Fail(status);
  *client = made.release();
  return FLASHCORE_OK;
}

void flashcore_close(flashcore_client* client) {
  if (client != nullptr && client->process.Here()) delete client;
}

void flashcore_shutdown(flashcore_client* client) {
  if (client == nullptr || !client->process.Here()) return;
  client->connection->End({c::kCancelled, "the client was shut down", ""});
}

int flashcore_ended(const flashcore_client* client) {
  return client != nullptr && (!client->process.Here() || client->connection->ended()) ? 1 : 0;
}

const char* flashcore_identity(const flashcore_client* client) {
  return client == nullptr ? "" : client->identity.c_str();
}

int flashcore_register_memory(flashcore_client* client, uint64_t bytes, int read_only,
                              int64_t timeout_ns, flashcore_memory* memory) {
  if (client == nullptr || memory == nullptr) return FailArgument("client or memory: null");
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  c::Memory made;
  c::Status status = c::Memory::Create(bytes, &made);
  std::string id;
  if (status.ok()) {
    status = Register(*client->connection, made, read_only != 0, Deadline(timeout_ns), &id);
  }
  if (!status.ok()) return Fail(status);
  *memory = {made.data(), made.bytes(), {}};
  std::memcpy(memory->region_id, id.data(), id.size());
  const std::lock_guard<std::mutex> lock(client->mutex);
  client->regions[id] = std::move(made);
  return FLASHCORE_OK;
}

int flashcore_unregister_memory(flashcore_client* client, const uint8_t region_id[16]) {
  if (client == nullptr || region_id == nullptr) return FailArgument("client or region_id: null");
  if (!client->process.Here()) return FailProcess(*client);
  constexpr uint32_t kRegionId = 1;
  const std::string id(reinterpret_cast<const char*>(region_id), 16);
  const std::lock_guard<std::mutex> lock(client->mutex);
  if (client->regions.erase(id) == 0) return Fail({c::kNotFound, "region_id: unknown", ""});
  client->connection->Tell(kUnregister, c::Writer().Bytes(kRegionId, id).message());
  return FLASHCORE_OK;
}

int flashcore_call(flashcore_client* client, const char* method, const void* request,
                   uint64_t request_bytes, int64_t timeout_ns, flashcore_bytes* response) {
  if (client == nullptr || method == nullptr || response == nullptr ||
      (request == nullptr && request_bytes > 0)) {
    return FailArgument("client, method, request or response: null");
  }
  constexpr uint32_t kMethod = 1, kMessage = 2, kTimeout = 3;
  *response = {nullptr, 0};
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  c::Writer call;
  call.Bytes(kMethod, method).Bytes(kMessage, {static_cast<const char*>(request), request_bytes});
  if (timeout_ns > 0) call.Number(kTimeout, static_cast<uint64_t>(timeout_ns));
  c::Reply reply;
  const c::Status status =
      client->connection->Exchange(kCall, call.message(), -1, Deadline(timeout_ns), &reply);
  if (!status.ok()) return Fail(status);
  if (reply.result.empty()) return FLASHCORE_OK;
  auto* const data = static_cast<uint8_t*>(std::malloc(reply.result.size()));
  if (data == nullptr) return Fail({c::kResourceExhausted, "malloc", ""});
  std::copy(reply.result.begin(), reply.result.end(), data);
  *response = {data, reply.result.size()};
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
  if (!client->process.Here()) return FailProcess(*client);
  if (timeout_ns == 0) return Fail(TooLate());
  if (client->connection->ended()) return Fail(client->connection->end_status());
  const std::lock_guard<std::mutex> lock(client->submit_mutex);
  Ring& ring = *client->ring;
  if (request_bytes > ring.RequestBytes()) {
    return Fail({c::kResourceExhausted,
                 "request: " + std::to_string(request_bytes) + " bytes, over the " +
                     std::to_string(ring.RequestBytes()) + " of a slot",
                 ""});
  }
  if (ring.Full()) return FLASHCORE_AGAIN;
  if (request_bytes > 0) std::memcpy(ring.NextSlot(), request, request_bytes);
  const auto timeout = static_cast<uint64_t>(std::max<int64_t>(0, timeout_ns));  // 0: none
  if (ring.Submit(tag, timeout, request_bytes)) {
    const uint64_t one = 1;
    while (write(client->doorbell.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }
  return FLASHCORE_OK;
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
    return Fail({c::kFailedPrecondition, "flashcore_wait after flashcore_event_fd: poll", ""});
  }
  client->ring->Wait(client->connection->ended(), c::Clock::now() + client->spin,
                     Deadline(timeout_ns));
  return Take(client, completion);
}

int flashcore_event_fd(flashcore_client* client, int* fd) {
  if (client == nullptr || fd == nullptr) return FailArgument("client, fd: null");
  if (!client->process.Here()) return FailProcess(*client);
  const std::lock_guard<std::mutex> lock(client->receive_mutex);
  if (client->receiver == nullptr) {
    const c::Status status = c::Receiver::Start(client->connection.get(), client->ring.get(),
                                                client->spin, &client->receiver);
    if (!status.ok()) return Fail(status);
  }
  *fd = client->receiver->fd();
  return FLASHCORE_OK;
}

int flashcore_cancel(flashcore_client* client, uint64_t tag) {
  if (client == nullptr) return FailArgument("client: null");
  if (!client->process.Here()) return FailProcess(*client);
  constexpr uint32_t kRing = 1, kTag = 2, kInRing = 3;
  if (client->connection->ended()) return Fail(client->connection->end_status());
  client->connection->Tell(kCancel, c::Writer()
                                        .Number(kRing, client->ring_number)
                                        .Number(kTag, tag)
                                        .Number(kInRing, 1)
                                        .message());
  return FLASHCORE_OK;
}

const char* flashcore_last_error(void) { return last_error.c_str(); }

const uint8_t* flashcore_last_status(uint64_t* size) {
  if (size != nullptr) *size = last_status.size();
  return reinterpret_cast<const uint8_t*>(last_status.data());
}
