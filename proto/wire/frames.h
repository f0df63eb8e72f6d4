// Frames and file descriptors on the local socket, as proto/flashcore/v1/local.proto describes
// them.
#ifndef FLASHCORE_PROTO_WIRE_FRAMES_H_
#define FLASHCORE_PROTO_WIRE_FRAMES_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace flashcore::wire {

inline constexpr uint32_t kMaxFrameBytes = 1 << 20;  // of a frame's message
inline constexpr size_t kFrameHeaderBytes = 4;       // the message's length, little-endian
inline constexpr size_t kMaxFilesAtOnce = 4;         // file descriptors that ReceiveBytes takes

// `message`, of at most kMaxFrameBytes, with its header.
std::string Frame(std::string_view message);

// The length in a header, which may be more than kMaxFrameBytes.
uint32_t FrameLength(const char* header);

// As send with `flags` and MSG_NOSIGNAL, but goes on after a signal. The file descriptor `file`
// travels with the first byte; -1: none.
ssize_t SendBytes(int socket, std::string_view bytes, int file, int flags);

struct Received {
  ssize_t bytes = 0;  // as recv returns it
  // More file descriptors came than there is room for, or than this process can open.
  bool lost_files = false;
};

// As recv with `flags`, but goes on after a signal. Calls `on_file` with each file descriptor that
// came with the bytes; `on_file` owns it, and it is closed on exec. Null: they are lost.
Received ReceiveBytes(int socket, void* to, size_t size, int flags,
                      const std::function<void(int)>& on_file);

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_WIRE_FRAMES_H_
