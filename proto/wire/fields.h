// Reads the fields of an encoded protobuf message one by one, as strictly as the generated parser.
#ifndef FLASHCORE_PROTO_WIRE_FIELDS_H_
#define FLASHCORE_PROTO_WIRE_FIELDS_H_

#include <cstddef>
#include <cstdint>

#include "google/protobuf/io/coded_stream.h"

namespace flashcore::wire {

// Wire types and tags of protobuf's encoding. Its documentation specifies them for all languages,
// so they need no header of the library, whose own (WireFormatLite) is private.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

constexpr uint32_t MakeTag(int number, WireType type) {
  return static_cast<uint32_t>(number) << 3 | type;
}
constexpr int FieldNumber(uint32_t tag) { return static_cast<int>(tag >> 3); }
constexpr uint32_t WireTypeOf(uint32_t tag) { return tag & 7; }

// 0 at the end of the message and for a malformed tag; AtEnd tells which.
uint32_t ReadTag(google::protobuf::io::CodedInputStream* in);

// Whether ReadTag, which returned 0, has read all of a message of `bytes` bytes.
bool AtEnd(google::protobuf::io::CodedInputStream* in, size_t bytes);

// The length of a kLengthDelimited value. False if it is malformed.
bool ReadLength(google::protobuf::io::CodedInputStream* in, uint32_t* length);

// Skips the value of the field `tag`, which lies in `depth` messages and groups. False if it is
// malformed.
bool SkipValue(google::protobuf::io::CodedInputStream* in, uint32_t tag, int depth);

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_WIRE_FIELDS_H_
