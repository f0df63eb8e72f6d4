// Frames of HTTP/2 (RFC 9113, section 6).
#ifndef FLASHCORE_TESTS_TRANSPORT_GRPC_GUARD_FRAMES_H_
#define FLASHCORE_TESTS_TRANSPORT_GRPC_GUARD_FRAMES_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace flashcore::server::testing {

// Types and flags.
inline constexpr char kData = 0;
inline constexpr char kHeaders = 1;
inline constexpr char kReset = 3;
inline constexpr char kSettings = 4;
inline constexpr char kPing = 6;
inline constexpr char kWindowUpdate = 8;
inline constexpr char kContinuation = 9;
inline constexpr char kAckFlag = 1;
inline constexpr char kEndHeaders = 4;

inline std::string Frame(char type, char flags, uint32_t stream, absl::string_view payload) {
  const auto byte = [](size_t value, int shift) { return static_cast<char>(value >> shift); };
  std::string header;
  for (const int shift : {16, 8, 0}) header += byte(payload.size(), shift);
  header += type;
  header += flags;
  for (const int shift : {24, 16, 8, 0}) header += byte(stream, shift);
  return absl::StrCat(header, payload);
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_GRPC_GUARD_FRAMES_H_
