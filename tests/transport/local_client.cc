#include "tests/transport/local_client.h"

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

namespace flashcore::server::testing {
namespace {

constexpr int kLongSeconds = 60;

absl::Status ToStatus(const v1::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code()), status.message());
}

std::string Frame(const google::protobuf::Message& message) {
  const std::string bytes = message.SerializeAsString();
  std::string frame(4, '\0');
  const auto length = static_cast<uint32_t>(bytes.size());
  std::memcpy(frame.data(), &length, 4);
  return frame + bytes;
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
  iovec from = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &from;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &file, sizeof(int));
  }
  const ssize_t sent = sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  if (sent < 0) return false;
  const auto count = static_cast<size_t>(sent);
  return count == bytes.size() || SendBytes(bytes.substr(count));
}

bool LocalClient::Send(const v1::LocalRequest& request, int file) {
  return SendBytes(Frame(request), file);
}

std::optional<v1::LocalReply> LocalClient::Receive() {
  std::string bytes(4, '\0');
  size_t want = 4;
  bool has_length = false;
  size_t have = 0;
  while (have < want) {
    iovec to = {bytes.data() + have, want - have};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &to;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t read = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (read <= 0) return std::nullopt;
    have += static_cast<size_t>(read);
    if (const cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part), sizeof(int));
      file_.reset(fd);
    }
    if (!has_length && have == 4) {
      uint32_t length = 0;
      std::memcpy(&length, bytes.data(), 4);
      has_length = true;
      want = 4 + length;
      bytes.resize(want);
    }
  }
  v1::LocalReply reply;
  if (!reply.ParseFromString(bytes.substr(4))) return std::nullopt;
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
  request.mutable_hello()->set_max_version(local::kVersion);
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
  header_ = reinterpret_cast<local::RingHeader*>(memory.data() + offset);
  slots_begin_ = memory.data() + offset + sizeof(local::RingHeader);
  slots_ = slots;
  slot_bytes_ = slot_bytes;
  return doorbell_.valid() ? absl::OkStatus() : absl::InternalError("no doorbell came");
}

std::byte* ClientRing::SubmissionSlot(uint64_t number) const {
  return slots_begin_ + number % slots_ * slot_bytes_;
}

void ClientRing::Write(uint64_t tag, const std::string& message, uint64_t timeout_ns) {
  const local::SubmissionSlot header = {tag, timeout_ns, static_cast<uint32_t>(message.size()), 0};
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
  local::CompletionSlot header;
  std::memcpy(&header, slot, sizeof(header));
  *tag = header.tag;
  const bool parsed =
      response->ParseFromArray(slot + sizeof(header), static_cast<int>(header.bytes));
  header_->received.store(++received_, std::memory_order_release);
  return parsed;
}

}  // namespace flashcore::server::testing
