// Flag types with their own grammar, parsed and printed by AbslParseFlag and AbslUnparseFlag.
#ifndef FLASHCORE_CLIENT_CLI_FLAG_TYPES_H_
#define FLASHCORE_CLIENT_CLI_FLAG_TYPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "flashcore/attend.h"

namespace flashcore {

// "float16" (or "fp16", "f16") | "bfloat16" (or "bf16").
bool AbslParseFlag(absl::string_view text, DType* dtype, std::string* error);
std::string AbslUnparseFlag(DType dtype);

// "same_as_query" | "int8" | "float8_e4m3".
bool AbslParseFlag(absl::string_view text, KvDType* kv_dtype, std::string* error);
std::string AbslUnparseFlag(KvDType kv_dtype);

// "16bit" | "int8_qk" | "int8_qk_pv".
bool AbslParseFlag(absl::string_view text, Precision* precision, std::string* error);
std::string AbslUnparseFlag(Precision precision);

// "NHD" | "HND".
bool AbslParseFlag(absl::string_view text, Layout* layout, std::string* error);
std::string AbslUnparseFlag(Layout layout);

// "none" | "causal" | "window:L,R" in rows; an L or R that is empty, or 2^31 and more, is no bound
// ("window:127,0", "window:,8").
bool AbslParseFlag(absl::string_view text, Mask* mask, std::string* error);
std::string AbslUnparseFlag(const Mask& mask);

namespace cli {

// The shape of a load: `batch` spans, each of `rows` query rows and K/V rows.
// "BxHxSxD", or "BxHq/HkvxSxD" for grouped-query attention; every number at least 1, Hkv divides
// Hq.
struct BenchShape {
  uint32_t batch = 1;
  uint32_t num_heads = 8;
  uint32_t num_kv_heads = 8;
  uint32_t rows = 512;
  uint32_t head_dim = 64;
};
bool AbslParseFlag(absl::string_view text, BenchShape* shape, std::string* error);
std::string AbslUnparseFlag(const BenchShape& shape);

// "all", or ids of 32 hexadecimal digits, separated by commas.
struct SequenceIds {
  bool all = false;
  std::vector<std::string> ids;  // 16 bytes each
};
bool AbslParseFlag(absl::string_view text, SequenceIds* ids, std::string* error);
std::string AbslUnparseFlag(const SequenceIds& ids);

// The requests of a load: inline requests, steps of resident sequences, or both kinds of steps.
// "attend" | "decode" | "prefill" | "mixed".
enum class BenchMode : uint8_t { kAttend, kDecode, kPrefill, kMixed };
bool AbslParseFlag(absl::string_view text, BenchMode* mode, std::string* error);
std::string AbslUnparseFlag(BenchMode mode);

// "tcp" | "unix" | "local": the server's local socket, with tensors in shared memory | "": any.
enum class Transport : uint8_t { kAny, kTcp, kUnix, kLocal };
bool AbslParseFlag(absl::string_view text, Transport* transport, std::string* error);
std::string AbslUnparseFlag(Transport transport);

// kUnix for "unix:path", kLocal for "local:path", else kTcp.
Transport TransportOf(absl::string_view target);

}  // namespace cli
}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CLI_FLAG_TYPES_H_
