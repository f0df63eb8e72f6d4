#include "client/cli/flag_types.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace flashcore {
namespace {

// Digits only: no sign, no spaces.
template <typename T>
bool ParseNumber(absl::string_view text, T* value) {
  if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return false;
  return absl::SimpleAtoi(text, value);
}

// An empty text is no bound.
bool ParseBound(absl::string_view text, std::optional<int32_t>* bound) {
  *bound = std::nullopt;
  if (text.empty()) return true;
  int32_t value = 0;
  if (!ParseNumber(text, &value)) return false;
  *bound = value;
  return true;
}

}  // namespace

bool AbslParseFlag(absl::string_view text, DType* dtype, std::string* error) {
  if (text == "float16" || text == "fp16" || text == "f16") {
    *dtype = DType::kFloat16;
  } else if (text == "bfloat16" || text == "bf16") {
    *dtype = DType::kBFloat16;
  } else {
    *error = "want float16 or bfloat16";
    return false;
  }
  return true;
}

std::string AbslUnparseFlag(DType dtype) {
  return dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

bool AbslParseFlag(absl::string_view text, Layout* layout, std::string* error) {
  if (text != "NHD" && text != "HND") {
    *error = "want NHD ([rows, heads, dim]) or HND ([heads, rows, dim])";
    return false;
  }
  *layout = text == "NHD" ? Layout::kNHD : Layout::kHND;
  return true;
}

std::string AbslUnparseFlag(Layout layout) { return layout == Layout::kNHD ? "NHD" : "HND"; }

bool AbslParseFlag(absl::string_view text, Mask* mask, std::string* error) {
  if (text == "none") {
    *mask = Mask::None();
    return true;
  }
  if (text == "causal") {
    *mask = Mask::Causal();
    return true;
  }
  if (absl::ConsumePrefix(&text, "window:")) {
    const std::vector<absl::string_view> bounds = absl::StrSplit(text, ',');
    std::optional<int32_t> left, right;
    if (bounds.size() == 2 && ParseBound(bounds[0], &left) && ParseBound(bounds[1], &right)) {
      *mask = Mask::SlidingWindow(left, right);
      return true;
    }
  }
  *error = "want none, causal or window:LEFT,RIGHT (rows, not negative; empty = no bound)";
  return false;
}

std::string AbslUnparseFlag(const Mask& mask) {
  if (mask.kind == Mask::Kind::kNone) return "none";
  if (mask.kind == Mask::Kind::kCausal) return "causal";
  const auto bound = [](std::optional<int32_t> b) { return b ? absl::StrCat(*b) : ""; };
  return absl::StrCat("window:", bound(mask.left), ",", bound(mask.right));
}

namespace cli {

bool AbslParseFlag(absl::string_view text, BenchShape* shape, std::string* error) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, 'x');
  *error = "want BxHxSxD or BxHq/HkvxSxD, such as 1x8x512x64 or 4x32/8x1024x128";
  if (parts.size() != 4) return false;
  const std::vector<absl::string_view> heads = absl::StrSplit(parts[1], '/');
  BenchShape out;
  if (heads.size() > 2 || !ParseNumber(parts[0], &out.batch) ||
      !ParseNumber(heads.front(), &out.num_heads) ||
      !ParseNumber(heads.back(), &out.num_kv_heads) || !ParseNumber(parts[2], &out.rows) ||
      !ParseNumber(parts[3], &out.head_dim)) {
    return false;
  }
  if (out.batch == 0 || out.num_heads == 0 || out.num_kv_heads == 0 || out.rows == 0 ||
      out.head_dim == 0 || out.num_heads % out.num_kv_heads != 0) {
    *error = "every number must be at least 1, and Hkv must divide Hq";
    return false;
  }
  if (out.batch > 65536 || out.num_heads > 65536 || out.head_dim > 65536) {
    *error = "want at most 65536 for B, Hq and D";
    return false;
  }
  *shape = out;
  error->clear();
  return true;
}

std::string AbslUnparseFlag(const BenchShape& shape) {
  const std::string heads = shape.num_heads == shape.num_kv_heads
                                ? absl::StrCat(shape.num_heads)
                                : absl::StrCat(shape.num_heads, "/", shape.num_kv_heads);
  return absl::StrCat(shape.batch, "x", heads, "x", shape.rows, "x", shape.head_dim);
}

bool AbslParseFlag(absl::string_view text, SequenceIds* ids, std::string* error) {
  SequenceIds out;
  out.all = text == "all";
  if (!out.all && !text.empty()) {
    for (const absl::string_view hex : absl::StrSplit(text, ',')) {
      if (hex.size() != 32 || !std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit)) {
        *error = "want all, or ids of 32 hexadecimal digits, separated by commas";
        return false;
      }
      out.ids.push_back(absl::HexStringToBytes(hex));
    }
  }
  *ids = std::move(out);
  return true;
}

std::string AbslUnparseFlag(const SequenceIds& ids) {
  if (ids.all) return "all";
  return absl::StrJoin(ids.ids, ",", [](std::string* out, const std::string& id) {
    out->append(absl::BytesToHexString(id));
  });
}

namespace {

constexpr std::pair<BenchMode, absl::string_view> kModes[] = {{BenchMode::kAttend, "attend"},
                                                              {BenchMode::kDecode, "decode"},
                                                              {BenchMode::kPrefill, "prefill"},
                                                              {BenchMode::kMixed, "mixed"}};
constexpr std::pair<Transport, absl::string_view> kTransports[] = {{Transport::kAny, ""},
                                                                   {Transport::kTcp, "tcp"},
                                                                   {Transport::kUnix, "unix"},
                                                                   {Transport::kShm, "shm"}};

// Looks up `text` in a table of names.
template <class Enum, size_t N>
bool ParseName(const std::pair<Enum, absl::string_view> (&names)[N], absl::string_view text,
               absl::string_view want, Enum* value, std::string* error) {
  for (const auto& [known, name] : names) {
    if (text != name) continue;
    *value = known;
    return true;
  }
  *error = absl::StrCat("want ", want);
  return false;
}

}  // namespace

bool AbslParseFlag(absl::string_view text, BenchMode* mode, std::string* error) {
  return ParseName(kModes, text, "attend, decode, prefill or mixed", mode, error);
}

std::string AbslUnparseFlag(BenchMode mode) {
  return std::string(kModes[static_cast<size_t>(mode)].second);
}

bool AbslParseFlag(absl::string_view text, Transport* transport, std::string* error) {
  return ParseName(kTransports, text, "tcp, unix or shm", transport, error);
}

std::string AbslUnparseFlag(Transport transport) {
  return std::string(kTransports[static_cast<size_t>(transport)].second);
}

Transport TransportOf(absl::string_view target) {
  return absl::StartsWith(target, "unix:") ? Transport::kUnix : Transport::kTcp;
}

}  // namespace cli
}  // namespace flashcore
