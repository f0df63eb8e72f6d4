// Where the host makes up what kernels read besides tensors: page tables, work lists, appends.
#ifndef FLASHCORE_SERVER_DEVICE_UPLOAD_BLOCK_H_
#define FLASHCORE_SERVER_DEVICE_UPLOAD_BLOCK_H_

#include <cstddef>

#include "server/base/align.h"

namespace flashcore::server {

// Hands out pieces of a block of host memory, one behind the other. Each has its place in a block
// of device memory of the same size; copying it there is the caller's. Owns neither. Not
// thread-safe.
class UploadBlock {
 public:
  static constexpr size_t kAlignment = 64;  // of the blocks and of every piece, bytes

  UploadBlock() = default;
  // `bytes` is a multiple of kAlignment.
  UploadBlock(void* host, void* device, size_t bytes)
      : host_(static_cast<std::byte*>(host)),
        device_(static_cast<std::byte*>(device)),
        bytes_(bytes) {}

  // A piece on the host; null if there is no room for it.
  std::byte* Take(size_t bytes) {
    if (bytes > room()) return nullptr;
    std::byte* piece = host_ + used_;
    used_ += AlignUp(bytes, kAlignment);
    return piece;
  }
  std::byte* OnDevice(const std::byte* piece) const { return device_ + (piece - host_); }

  size_t used() const { return used_; }
  size_t room() const { return bytes_ - used_; }
  // Takes back what was handed out since used() was that. None of it has been sent.
  void Rewind(size_t used) { used_ = used; }

  // What was handed out since the last call, to be copied to the device now.
  struct Unsent {
    std::byte* device;
    const std::byte* host;
    size_t bytes;
  };
  Unsent TakeUnsent() {
    const Unsent unsent = {device_ + sent_, host_ + sent_, used_ - sent_};
    sent_ = used_;
    return unsent;
  }

  // All of it is free again: the device has what was sent, and is done with it.
  void Clear() { used_ = sent_ = 0; }

 private:
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
  size_t sent_ = 0;  // <= used_
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_UPLOAD_BLOCK_H_
