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

// Names of the values of an enum. The first name of a value is the one that is printed.
template <typename Enum>
using Name = std::pair<Enum, absl::string_view>;

constexpr Name<DType> kDTypes[] = {{DType::kFloat16, "float16"},
                                   {DType::kFloat16, "fp16"},
                                   {DType::kFloat16, "f16"},
                                   {DType::kBFloat16, "bfloat16"},
                                   {DType::kBFloat16, "bf16"}};
constexpr Name<KvDType> kKvDTypes[] = {{KvDType::kSameAsQuery, "same_as_query"},
                                       {KvDType::kInt8, "int8"},
                                       {KvDType::kFloat8E4M3, "float8_e4m3"}};
constexpr Name<Precision> kPrecisions[] = {{Precision::k16Bit, "16bit"},
                                           {Precision::kInt8Qk, "int8_qk"},
                                           {Precision::kInt8QkPv, "int8_qk_pv"}};
constexpr Name<Layout> kLayouts[] = {{Layout::kNHD, "NHD"}, {Layout::kHND, "HND"}};
constexpr Name<cli::BenchMode> kModes[] = {{cli::BenchMode::kAttend, "attend"},
                                           {cli::BenchMode::kDecode, "decode"},
                                           {cli::BenchMode::kPrefill, "prefill"},
                                           {cli::BenchMode::kMixed, "mixed"}};
constexpr Name<cli::Transport> kTransports[] = {{cli::Transport::kAny, ""},
                                                {cli::Transport::kTcp, "tcp"},
                                                {cli::Transport::kUnix, "unix"},
                                                {cli::Transport::kLocal, "local"}};

// Looks up `text` in a table of names.
template <typename Enum, size_t N>
bool ParseName(const Name<Enum> (&names)[N], absl::string_view text, const char* problem,
               Enum* value, std::string* error) {
  for (const auto& [known, name] : names) {
    if (text != name) continue;
    *value = known;
    return true;
  }
  *error = problem;
  return false;
}

template <typename Enum, size_t N>
std::string NameOf(const Name<Enum> (&names)[N], Enum value) {
  for (const auto& [known, name] : names) {
    if (value == known) return std::string(name);
  }
  return "";
}

// Digits only: no sign, no spaces.
template <typename T>
bool ParseNumber(absl::string_view text, T* value) {
  if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return false;
  return absl::SimpleAtoi(text, value);
}

// An empty text leaves `bound` unset, and so do 2^31 rows and more: no K/V is longer.
bool ParseBound(absl::string_view text, std::optional<int32_t>* bound) {
  if (text.find_first_not_of("0123456789") != text.npos) return false;
  int32_t rows = 0;
  if (ParseNumber(text, &rows)) *bound = rows;
  return true;
}

}  // namespace

bool AbslParseFlag(absl::string_view text, DType* dtype, std::string* error) {
  return ParseName(kDTypes, text, "want float16 or bfloat16", dtype, error);
}

std::string AbslUnparseFlag(DType dtype) { return NameOf(kDTypes, dtype); }

bool AbslParseFlag(absl::string_view text, KvDType* kv_dtype, std::string* error) {
  return ParseName(kKvDTypes, text, "want same_as_query, int8 or float8_e4m3", kv_dtype, error);
}

std::string AbslUnparseFlag(KvDType kv_dtype) { return NameOf(kKvDTypes, kv_dtype); }

bool AbslParseFlag(absl::string_view text, Precision* precision, std::string* error) {
  return ParseName(kPrecisions, text, "want 16bit, int8_qk or int8_qk_pv", precision, error);
}

std::string AbslUnparseFlag(Precision precision) { return NameOf(kPrecisions, precision); }

bool AbslParseFlag(absl::string_view text, Layout* layout, std::string* error) {
  return ParseName(kLayouts, text, "want NHD ([rows, heads, dim]) or HND ([heads, rows, dim])",
                   layout, error);
}

std::string AbslUnparseFlag(Layout layout) { return NameOf(kLayouts, layout); }

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

bool AbslParseFlag(absl::string_view text, BenchMode* mode, std::string* error) {
  return ParseName(kModes, text, "want attend, decode, prefill or mixed", mode, error);
}

std::string AbslUnparseFlag(BenchMode mode) { return NameOf(kModes, mode); }

bool AbslParseFlag(absl::string_view text, Transport* transport, std::string* error) {
  return ParseName(kTransports, text, "want tcp, unix or local", transport, error);
}

std::string AbslUnparseFlag(Transport transport) { return NameOf(kTransports, transport); }

Transport TransportOf(absl::string_view target) {
  if (absl::StartsWith(target, "local:")) return Transport::kLocal;
  return absl::StartsWith(target, "unix:") ? Transport::kUnix : Transport::kTcp;
}

}  // namespace cli
}  // namespace flashcore
