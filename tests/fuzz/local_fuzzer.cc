// Feeds the local socket and its rings: frames through a socket, and slots and counters through a
// ring in memory. Whatever they say, what is taken is within its limits.
//
// An input is one byte that says what the rest is:
//   [0] % 2 == 0   bytes that the client sends, all at once
//   [0] % 2 == 1   steps of a ring of 4 slots of 256 bytes, each: a byte added to `submitted`, one
//                  added to `received`, the number of bytes of a slot, and the slot
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flashcore/v1/local.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "proto/wire/ring.h"
#include "server/kv/operation.h"
#include "server/memory/regions.h"
#include "server/request/validate.h"
#include "server/transport/local/frame_socket.h"
#include "server/transport/local/ring.h"
#include "server/transport/rpc/message.h"
#include "tests/fuzz/require.h"
#include "tests/memory/memfd.h"

namespace flashcore::fuzz {
namespace {

constexpr char kRegionInInputs[] = "a region, 8 KiB!";
constexpr size_t kRegionBytes = 8192;
constexpr uint32_t kSlots = 4;
constexpr uint32_t kSlotBytes = 256;

// A region that holds the ring and the tensors.
struct Memory {
  server::Regions::Region region = server::testing::Memfd(kRegionBytes).Map();
  server::Regions regions;
  std::string id = regions.Add(region);
};

Memory& Shared() {
  static auto* const kShared = new Memory;
  return *kShared;
}

server::PassedFiles& PassedOnes() {
  static auto* const kPassedFiles = new server::PassedFiles;
  return *kPassedFiles;
}

// The socket's reading of `bytes` equals a plain reading of them.
void CheckFrames(const std::string& bytes) {
  int ends[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "no sockets");
  server::UnsentReplies unsent;
  server::local::FrameSocket socket(server::FileDescriptor{ends[0]}, "client", &PassedOnes(),
                                    &unsent, /*on_cut_off=*/nullptr);
  const server::FileDescriptor client(ends[1]);
  Require(send(client.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          "cannot send");
  constexpr size_t kMaxBytes = 1024;
  size_t begin = 0;
  Require(socket.Read().ok(), "reading fails");
  while (true) {
    const auto frame = socket.Next(kMaxBytes);
    uint32_t length = 0;
    const bool has_length = bytes.size() - begin >= sizeof(length);
    if (has_length) std::memcpy(&length, bytes.data() + begin, sizeof(length));
    Require(frame.ok() == !(has_length && length > kMaxBytes), "the limit is another");
    if (!frame.ok()) return;
    const bool complete = has_length && bytes.size() - begin - sizeof(length) >= length;
    Require(frame->has_value() == complete, "another number of frames");
    if (!complete) break;
    Require(**frame == bytes.substr(begin + sizeof(length), length), "another frame");
    begin += sizeof(length) + length;
    v1::LocalRequest request;
    static_cast<void>(request.ParseFromArray((*frame)->data(), static_cast<int>(length)));
  }
  Require(!socket.TakeFile().ok() && !socket.HasStrayFiles(), "a file from nowhere");
}

// A request that passes validation has its tensors within the region.
void CheckRequest(const std::string& message) {
  server::AttendOperation operation;
  server::TensorFields tensors;
  bool well_formed = false;
  const absl::Status parsed = server::ParseAttend(wire::MessageView(message), &Shared().regions,
                                                  &operation, &tensors, &well_formed);
  Require(well_formed || !parsed.ok(), "a malformed message passes");
  if (!parsed.ok()) return;
  const server::AttendRequest& request = operation.request;
  const server::RequestLimits limits = {16, 16, {kernels::DType::kFloat16}, {16, 32}, 1e12};
  if (!server::ValidateAttend(request, limits).ok()) return;
  const size_t bytes[] = {request.query_bytes, request.key_bytes, request.value_bytes,
                          request.output_bytes(), request.lse_bytes()};
  for (int i = 0; i < server::kNumTensors; ++i) {
    if (request.ranges[i].region == nullptr) {
      Require(i > server::kValue || tensors[i].offset + tensors[i].size <= message.size(),
              "a tensor outside its message");
    } else {
      Require(request.ranges[i].region == Shared().region &&
                  request.ranges[i].offset <= kRegionBytes &&
                  bytes[i] <= kRegionBytes - request.ranges[i].offset,
              "a tensor outside its region");
    }
  }
  std::string error;
  server::WriteError(request.request_id, absl::InternalError(std::string(1000, 'x')),
                     kSlotBytes - sizeof(wire::CompletionSlot), &error);
  Require(error.size() <= kSlotBytes - sizeof(wire::CompletionSlot), "an error that is too long");
}

void CheckRing(std::string bytes) {
  const size_t id = bytes.find(kRegionInInputs);
  if (id != std::string::npos) bytes.replace(id, Shared().id.size(), Shared().id);
  std::byte* const memory = Shared().region->data();
  std::memset(memory, 0, kRegionBytes);
  auto* const header = reinterpret_cast<wire::RingHeader*>(memory);
  const auto ring = server::local::Ring::Open(Shared().region, {0, kSlots, kSlotBytes}).value();
  std::vector<uint64_t> unanswered;
  uint64_t taken = 0;
  for (size_t at = 0; at + 3 <= bytes.size();) {
    const size_t count =
        std::min(bytes.size() - at - 3, size_t{static_cast<uint8_t>(bytes[at + 2])});
    std::byte* const slot =
        memory + sizeof(*header) + header->submitted.load() % kSlots * kSlotBytes;
    std::memcpy(slot, bytes.data() + at + 3, count);
    header->submitted += static_cast<int8_t>(bytes[at]);
    header->received += static_cast<int8_t>(bytes[at + 1]);
    at += 3 + count;
    while (true) {
      wire::SubmissionSlot taken_slot;
      std::string message;
      const auto took = ring->Take(&taken_slot, &message);
      if (!took.ok()) return;
      if (!*took) break;
      Require(message.size() <= kSlotBytes - sizeof(taken_slot), "more than a slot");
      Require(header->taken == ++taken, "not counted");
      unanswered.push_back(taken_slot.tag);
      Require(taken - header->received <= kSlots, "more requests than answers have room");
      CheckRequest(message);
    }
    if (unanswered.empty()) continue;
    ring->Answer(unanswered.back(), "answer");
    unanswered.pop_back();
  }
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  google::protobuf::SetLogHandler(nullptr);  // it complains of every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(data + 1, data + size);
  if (data[0] % 2 == 0) {
    flashcore::fuzz::CheckFrames(bytes);
  } else {
    flashcore::fuzz::CheckRing(bytes);
  }
  return 0;
}
