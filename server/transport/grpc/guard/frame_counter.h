// Counts the frames of an HTTP/2 connection.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_FRAME_COUNTER_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_FRAME_COUNTER_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// The bytes of one client. Not thread-safe.
class FrameCounter {
 public:
  // The next bytes of the connection, which begins with the preface. Bytes that are not HTTP/2
  // count as nothing in particular.
  void Read(absl::string_view bytes);

  uint64_t bytes() const { return bytes_; }
  uint64_t frames() const { return frames_; }                   // of all types
  uint64_t pings() const { return pings_; }                     // frames PING
  uint64_t streams() const { return streams_; }                 // that it has begun
  uint64_t resets() const { return resets_; }                   // frames RST_STREAM
  bool settings_acknowledged() const { return acknowledged_; }  // of the server
  // Bytes of the longest block of headers, that is of a HEADERS frame and its CONTINUATIONs.
  uint64_t longest_headers() const { return longest_headers_; }

 private:
  static constexpr size_t kPrefaceSize = 24;
  static constexpr size_t kHeaderSize = 9;

  void ReadHeader();

  uint64_t skip_ = kPrefaceSize;  // bytes until the next frame's header
  uint8_t header_[kHeaderSize];
  size_t header_size_ = 0;  // bytes of it that are there
  uint32_t last_stream_ = 0;
  uint64_t bytes_ = 0;
  uint64_t frames_ = 0;
  uint64_t pings_ = 0;
  uint64_t streams_ = 0;
  uint64_t resets_ = 0;
  bool acknowledged_ = false;
  uint64_t headers_ = 0;  // bytes of the current block
  uint64_t longest_headers_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_FRAME_COUNTER_H_
