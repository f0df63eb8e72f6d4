#include "tests/transport/local/client.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <ctime>

#include "proto/wire/frames.h"

namespace flashcore::server::testing {
namespace {

constexpr int kLongSeconds = 60;

absl::Status ToStatus(const v1::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code()), status.message());
}

}  // namespace

LocalClient::LocalClient(const std::string& path)
    : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    socket_.reset();
  }
  const timeval limit = {kLongSeconds, 0};
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

bool LocalClient::SendBytes(const std::string& bytes, int file) {
  const ssize_t sent = wire::SendBytes(socket_.get(), bytes, file, /*flags=*/0);
  if (sent < 0) return false;
  const auto count = static_cast<size_t>(sent);
  return count == bytes.size() || SendBytes(bytes.substr(count));
}

bool LocalClient::Send(const v1::LocalRequest& request, int file) {
  return SendBytes(wire::Frame(request.SerializeAsString()), file);
}

std::optional<std::string> LocalClient::ReceiveBytes(size_t size) {
  std::string bytes(size, '\0');
  for (size_t have = 0; have < size;) {
    const wire::Received received =
        wire::ReceiveBytes(socket_.get(), bytes.data() + have, size - have, /*flags=*/0,
                           [this](int file) { file_.reset(file); });
    if (received.bytes <= 0) return std::nullopt;
    have += static_cast<size_t>(received.bytes);
  }
  return bytes;
}

std::optional<v1::LocalReply> LocalClient::Receive() {
  const auto header = ReceiveBytes(wire::kFrameHeaderBytes);
  if (!header.has_value()) return std::nullopt;
  const auto message = ReceiveBytes(wire::FrameLength(header->data()));
  v1::LocalReply reply;
  if (!message.has_value() || !reply.ParseFromString(*message)) return std::nullopt;
  return reply;
}

absl::Status LocalClient::Do(v1::LocalRequest request, v1::LocalReply* reply, int file) {
  request.set_id(NextId());
  if (!Send(request, file)) return absl::UnavailableError("cannot send");
  std::optional<v1::LocalReply> answer = Receive();
  if (!answer.has_value()) return absl::UnavailableError("the connection has ended");
  if (reply != nullptr) *reply = *answer;
  return ToStatus(answer->status());
}

absl::Status LocalClient::Hello() {
  v1::LocalRequest request;
  request.mutable_hello()->set_min_version(1);
  request.mutable_hello()->set_max_version(wire::kLocalVersion);
  request.mutable_hello()->set_client("test");
  return Do(request);
}

absl::Status LocalClient::Register(int file, uint64_t bytes, std::string* id, bool read_only) {
  v1::LocalRequest request;
  request.mutable_register_memory()->set_bytes(bytes);
  request.mutable_register_memory()->set_read_only(read_only);
  v1::LocalReply reply;
  const absl::Status status = Do(request, &reply, file);
  *id = reply.register_memory().region_id();
  return status;
}

absl::Status LocalClient::Unregister(const std::string& id) {
  v1::LocalRequest request;
  request.mutable_unregister_memory()->set_region_id(id);
  return Do(request);
}

absl::Status LocalClient::Call(const std::string& method, const google::protobuf::Message& request,
                               google::protobuf::Message* response) {
  v1::LocalRequest call;
  call.mutable_call()->set_method(method);
  call.mutable_call()->set_message(request.SerializeAsString());
  v1::LocalReply reply;
  const absl::Status status = Do(call, &reply);
  if (status.ok()) response->ParseFromString(reply.message());
  return status;
}

absl::Status ClientRing::Open(LocalClient* client, const Memfd& memory,
                              const std::string& region_id, uint64_t offset, uint32_t slots,
                              uint32_t slot_bytes) {
  v1::LocalRequest request;
  v1::LocalOpenRing& ring = *request.mutable_open_ring();
  ring.set_region_id(region_id);
  ring.set_offset(offset);
  ring.set_slots(slots);
  ring.set_slot_bytes(slot_bytes);
  v1::LocalReply reply;
  const absl::Status status = client->Do(request, &reply);
  if (!status.ok()) return status;
  doorbell_ = client->TakeFile();
  number_ = reply.open_ring().ring();
  header_ = reinterpret_cast<wire::RingHeader*>(memory.data() + offset);
  slots_begin_ = memory.data() + offset + sizeof(wire::RingHeader);
  slots_ = slots;
  slot_bytes_ = slot_bytes;
  return doorbell_.valid() ? absl::OkStatus() : absl::InternalError("no doorbell came");
}

std::byte* ClientRing::SubmissionSlot(uint64_t number) const {
  return slots_begin_ + number % slots_ * slot_bytes_;
}

void ClientRing::Write(uint64_t tag, const std::string& message, uint64_t timeout_ns) {
  const wire::SubmissionSlot header = {tag, timeout_ns, static_cast<uint32_t>(message.size()), 0};
  std::byte* const slot = SubmissionSlot(submitted_);
  std::memcpy(slot, &header, sizeof(header));
  std::memcpy(slot + sizeof(header), message.data(), message.size());
  header_->submitted.store(++submitted_, std::memory_order_release);
}

void ClientRing::Ring() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header_->server_sleeps.load() != 0) eventfd_write(doorbell_.get(), 1);
}

bool ClientRing::HasAnswer() const { return header_->completed.load() != received_; }

bool ClientRing::Receive(uint64_t* tag, v1::AttendResponse* response) {
  const time_t end = time(nullptr) + kLongSeconds;
  while (!HasAnswer()) {
    if (time(nullptr) > end) return false;
    header_->client_sleeps.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (HasAnswer()) break;
    const timespec limit = {1, 0};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header_->client_sleeps), FUTEX_WAIT, 1, &limit,
            nullptr, 0);
  }
  const std::byte* const slot = slots_begin_ + (slots_ + received_ % slots_) * size_t{slot_bytes_};
  wire::CompletionSlot header;
  std::memcpy(&header, slot, sizeof(header));
  *tag = header.tag;
  const bool parsed =
      response->ParseFromArray(slot + sizeof(header), static_cast<int>(header.bytes));
  header_->received.store(++received_, std::memory_order_release);
  return parsed;
}

}  // namespace flashcore::server::testing
