#include "server/transport/grpc/guard/frame_counter.h"

#include <algorithm>
#include <cstring>

namespace flashcore::server {
namespace {

// Types and flags of frames (RFC 9113, section 6).
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kReset = 3;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kPing = 6;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kAck = 1;

}  // namespace

void FrameCounter::Read(absl::string_view bytes) {
  bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (skip_ > 0) {
      const size_t skipped = std::min<uint64_t>(skip_, bytes.size());
      skip_ -= skipped;
      bytes.remove_prefix(skipped);
      continue;
    }
    const size_t taken = std::min(kHeaderSize - header_size_, bytes.size());
    memcpy(header_ + header_size_, bytes.data(), taken);
    header_size_ += taken;
    bytes.remove_prefix(taken);
    if (header_size_ == kHeaderSize) ReadHeader();
  }
}

// The header of a frame: its length in 3 bytes, its type, flags, and the number of its stream.
void FrameCounter::ReadHeader() {
  const uint8_t* const h = header_;
  skip_ = uint64_t{h[0]} << 16 | uint64_t{h[1]} << 8 | h[2];
  header_size_ = 0;
  ++frames_;
  const uint8_t type = h[3];
  const uint32_t stream = (h[5] & 0x7fu) << 24 | uint32_t{h[6]} << 16 | uint32_t{h[7]} << 8 | h[8];
  if (type == kHeaders) {
    if (stream > last_stream_) {  // else these are its trailers
      last_stream_ = stream;
      ++streams_;
    }
    headers_ = skip_;
  } else if (type == kContinuation) {
    headers_ += skip_;
  } else if (type == kReset) {
    ++resets_;
  } else if (type == kPing) {
    ++pings_;
  } else if (type == kSettings && (h[4] & kAck) != 0) {
    acknowledged_ = true;
  }
  longest_headers_ = std::max(longest_headers_, headers_);
}

}  // namespace flashcore::server
