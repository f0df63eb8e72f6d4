// Writes and reads the few messages of proto/flashcore/v1/local.proto by their fields.
// The C library has no protobuf in it: so it shares a process with any other copy, and needs
// nothing to be built. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_FIELDS_H_
#define FLASHCORE_CLIENT_LOCAL_FIELDS_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace flashcore::client::local {

// Appends fields to a message.
class Writer {
 public:
  Writer& Number(uint32_t field, uint64_t value) {
    Varint(uint64_t{field} << 3);
    Varint(value);
    return *this;
  }
  // A string, bytes or a message.
  Writer& Bytes(uint32_t field, std::string_view value) {
    Varint(uint64_t{field} << 3 | 2);
    Varint(value.size());
    message_.append(value);
    return *this;
  }
  // Empty again, with its memory.
  Writer& Clear() {
    message_.clear();
    return *this;
  }
  const std::string& message() const { return message_; }

 private:
  void Varint(uint64_t value) {
    for (; value > 0x7f; value >>= 7) message_ += static_cast<char>(value | 0x80);
    message_ += static_cast<char>(value);
  }

  std::string message_;
};

// Goes through the fields of a message, which outlives it.
class Reader {
 public:
  explicit Reader(std::string_view message) : rest_(message) {}

  // The next field. False at the end, and if the message is malformed.
  bool Next() {
    number_ = 0;
    bytes_ = {};
    uint64_t tag = 0;
    if (rest_.empty() || !Varint(&tag)) return false;
    field_ = tag >> 3;
    switch (tag & 7) {
      case 0:
        return Varint(&number_);
      case 1:
        return Take(8);
      case 2: {
        uint64_t size = 0;
        return Varint(&size) && Take(size);
      }
      case 5:
        return Take(4);
      default:  // groups: the contract has none
        malformed_ = true;
        return false;
    }
  }

  uint64_t field() const { return field_; }
  uint64_t number() const { return number_; }        // of a varint, else 0
  std::string_view bytes() const { return bytes_; }  // of a string, bytes or a message, else empty
  bool malformed() const { return malformed_; }

 private:
  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(rest_.front());
      rest_.remove_prefix(1);
      *value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return true;
    }
    malformed_ = true;
    return false;
  }
  bool Take(uint64_t size) {
    if (size > rest_.size()) {
      malformed_ = true;
      return false;
    }
    bytes_ = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }

  std::string_view rest_;
  uint64_t field_ = 0;
  uint64_t number_ = 0;
  std::string_view bytes_;
  bool malformed_ = false;
};

// The field of `message` that is a number, or bytes; 0 or empty without it.
inline uint64_t NumberField(std::string_view message, uint32_t field) {
  uint64_t number = 0;
  Reader reader(message);
  while (reader.Next()) {
    if (reader.field() == field) number = reader.number();
  }
  return number;
}
inline std::string BytesField(std::string_view message, uint32_t field) {
  std::string_view bytes;
  Reader reader(message);
  while (reader.Next()) {
    if (reader.field() == field) bytes = reader.bytes();
  }
  return std::string(bytes);
}

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_FIELDS_H_
