#include "proto/wire/frames.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace flashcore::wire {

std::string Frame(std::string_view message) {
  std::string frame;
  frame.reserve(kFrameHeaderBytes + message.size());
  for (size_t i = 0; i < kFrameHeaderBytes; ++i) {
    frame += static_cast<char>(message.size() >> 8 * i & 0xff);
  }
  frame.append(message.data(), message.size());
  return frame;
}

uint32_t FrameLength(const char* header) {
  uint32_t length = 0;
  for (size_t i = 0; i < kFrameHeaderBytes; ++i) {
    length |= uint32_t{static_cast<uint8_t>(header[i])} << 8 * i;
  }
  return length;
}

ssize_t SendBytes(int socket, std::string_view bytes, int file, int flags) {
  iovec data = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
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
  while (true) {
    const ssize_t sent = sendmsg(socket, &message, flags | MSG_NOSIGNAL);
    if (sent >= 0 || errno != EINTR) return sent;
  }
}

Received ReceiveBytes(int socket, void* to, size_t size, int flags,
                      const std::function<void(int)>& on_file) {
  iovec data = {to, size};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFilesAtOnce * sizeof(int))];
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  Received received;
  do {
    message.msg_control = on_file ? control : nullptr;
    message.msg_controllen = on_file ? sizeof(control) : 0;
    received.bytes = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (received.bytes < 0 && errno == EINTR);
  if (received.bytes < 0) return received;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      on_file(file);
    }
  }
  received.lost_files = (message.msg_flags & MSG_CTRUNC) != 0;
  return received;
}

}  // namespace flashcore::wire
