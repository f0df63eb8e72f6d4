#include "client/cli/npy.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace flashcore::cli {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);

// Parses the header's Python literal: {'descr': '<f2', 'fortran_order': False, 'shape': (1, 2)},
// with the keys in any order. Each method returns false if the text does not match.
class HeaderParser {
 public:
  explicit HeaderParser(absl::string_view text) : text_(text) {}

  bool Parse(std::string* descr, bool* fortran_order, std::vector<uint64_t>* shape) {
    bool has_descr = false, has_order = false, has_shape = false;
    if (!Take("{")) return false;
    while (!Take("}")) {
      std::string key;
      if (!String(&key) || !Take(":")) return false;
      bool* seen = key == "descr"           ? &has_descr
                   : key == "fortran_order" ? &has_order
                   : key == "shape"         ? &has_shape
                                            : nullptr;
      if (seen == nullptr || *seen) return false;
      *seen = true;
      if (key == "descr" && !String(descr)) return false;
      if (key == "fortran_order" && !Bool(fortran_order)) return false;
      if (key == "shape" && !Tuple(shape)) return false;
      if (!Take(",") && !absl::StartsWith(text_, "}")) return false;
    }
    return has_descr && has_order && has_shape && text_.empty();
  }

 private:
  void SkipSpace() { text_ = absl::StripLeadingAsciiWhitespace(text_); }

  bool Take(absl::string_view token) {
    SkipSpace();
    const bool taken = absl::ConsumePrefix(&text_, token);
    SkipSpace();
    return taken;
  }

  bool String(std::string* value) {
    const char quote = text_.empty() ? '\0' : text_[0];
    if (quote != '\'' && quote != '"') return false;
    const size_t end = text_.find(quote, 1);
    if (end == text_.npos) return false;
    *value = std::string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    SkipSpace();
    return true;
  }

  bool Bool(bool* value) {
    *value = Take("True");
    return *value || Take("False");
  }

  bool Tuple(std::vector<uint64_t>* values) {
    values->clear();
    if (!Take("(")) return false;
    while (!Take(")")) {
      const size_t digits = std::min(text_.find_first_not_of("0123456789"), text_.size());
      uint64_t value = 0;
      if (digits == 0 || !absl::SimpleAtoi(text_.substr(0, digits), &value)) return false;
      text_.remove_prefix(digits);
      values->push_back(value);
      if (!Take(",") && !absl::StartsWith(text_, ")")) return false;
    }
    return true;
  }

  absl::string_view text_;
};

// False if the product overflows.
bool TotalBytes(const NpyArray& array, uint64_t* bytes) {
  *bytes = array.ElementBytes();
  for (const uint64_t size : array.shape) {
    if (__builtin_mul_overflow(*bytes, size, bytes)) return false;
  }
  return true;
}

// Removes magic, version and header from `bytes`. Returns null, or what is wrong.
const char* TakeHeader(absl::string_view* bytes, absl::string_view* header) {
  if (!absl::ConsumePrefix(bytes, kMagic)) return "not an .npy file (no magic)";
  if (bytes->size() < 4) return "ends within its header";
  const int version = static_cast<unsigned char>((*bytes)[0]);
  if ((version != 1 && version != 2) || (*bytes)[1] != '\0') {
    return "format version is not 1.0 or 2.0";
  }
  bytes->remove_prefix(2);
  const size_t length_bytes = version == 1 ? 2 : 4;
  if (bytes->size() < length_bytes) return "ends within its header";
  size_t length = 0;
  for (size_t i = 0; i < length_bytes; ++i) {
    length |= size_t{static_cast<unsigned char>((*bytes)[i])} << (8 * i);
  }
  bytes->remove_prefix(length_bytes);
  if (bytes->size() < length) return "ends within its header";
  *header = bytes->substr(0, length);
  bytes->remove_prefix(length);
  return nullptr;
}

}  // namespace

absl::StatusOr<NpyArray> ParseNpy(absl::string_view name, absl::string_view bytes) {
  const auto error = [name](const auto&... problem) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", problem...));
  };
  absl::string_view header;
  if (const char* problem = TakeHeader(&bytes, &header); problem != nullptr) return error(problem);
  NpyArray array;
  bool fortran_order = false;
  if (!HeaderParser(header).Parse(&array.descr, &fortran_order, &array.shape)) {
    return error("its header is not the dictionary of descr, fortran_order and shape");
  }
  if (array.descr != "<f2" && array.descr != "<f4" && array.descr != "<u2") {
    return error("dtype '", array.descr, "'; want '<f2', '<f4' or '<u2' (bits of bfloat16)");
  }
  if (fortran_order) return error("Fortran order; want C order");
  uint64_t want = 0;
  if (!TotalBytes(array, &want) || want != bytes.size()) {
    return error("shape (", absl::StrJoin(array.shape, ", "), ") of '", array.descr,
                 "' does not fit the ", bytes.size(), " bytes of data that follow the header");
  }
  const std::byte* data = reinterpret_cast<const std::byte*>(bytes.data());
  array.data.assign(data, data + bytes.size());
  return array;
}

std::string SerializeNpy(const NpyArray& array) {
  std::string header =
      absl::StrCat("{'descr': '", array.descr, "', 'fortran_order': False, 'shape': (",
                   absl::StrJoin(array.shape, ", "), array.shape.size() == 1 ? ",), }" : "), }");
  const size_t before = kMagic.size() + 4;
  const size_t padding = 63 - (before + header.size()) % 64;
  header.append(padding, ' ').append("\n");
  std::string out(kMagic);
  out.append({'\x01', '\x00', static_cast<char>(header.size() & 0xff),
              static_cast<char>(header.size() >> 8)});
  out.append(header);
  out.append(reinterpret_cast<const char*>(array.data.data()), array.data.size());
  return out;
}

absl::StatusOr<NpyArray> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return absl::UnknownError(absl::StrCat(path, ": ", std::strerror(errno)));
  return ParseNpy(path, bytes);
}

absl::Status WriteNpy(const std::string& path, const NpyArray& array) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << SerializeNpy(array);
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat(path, ": cannot write: ", std::strerror(errno)));
}

}  // namespace flashcore::cli
