// A case of `flashcore verify`: a random request, where its K/V lies, and how it is sent.
#ifndef FLASHCORE_CLIENT_BENCH_VERIFY_CASE_H_
#define FLASHCORE_CLIENT_BENCH_VERIFY_CASE_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/bench/reply_check.h"
#include "flashcore/client.h"

namespace flashcore::cli {

inline constexpr uint32_t kMaxVerifyRows = 33000;  // K/V rows of the longest span

// The server's abilities and memory.
struct Abilities {
  explicit Abilities(const v1::GetServerInfoResponse& info);

  v1::Limits limits;
  std::vector<DType> dtypes;
  std::map<uint32_t, std::vector<KvDType>> kv_dtypes;  // by head_dim: 8-bit ones that it stores
  // By head_dim: the least that a request may accept over INT8 K/V, and get.
  std::map<uint32_t, std::vector<Precision>> precisions;
  bool float16_sums = false;  // they have their own error bound, and overflow
  uint64_t kv_bytes = 0;      // of one case on the server: a quarter of what is free
};

enum class KvPlace : uint8_t {
  kInline,    // in the request
  kResident,  // in a sequence of each span
  kForked,    // in a sequence and its forks, which share their first rows
};

struct Case {
  AttendRequest shape;  // as if all K/V were inline; without tensors
  bool lse = false;
  float magnitude = 1;
  bool each_span = false;  // its errors are judged apart from other spans'
  KvPlace place = KvPlace::kInline;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  uint32_t prefix_rows = 0;             // kForked: shared, in every span
  std::vector<uint32_t> appended_rows;  // of each span, by the request itself; not kInline
};

// Case number `number`, from 1. Places, lengths and precisions take turns: of ten cases, four have
// resident K/V, two of them over a shared prefix of at least 512 rows, and three are long. The
// first long case of each place has kMaxVerifyRows, if the server can hold them.
Case RandomCase(const Abilities& server, int number, std::mt19937_64* random);

std::string Describe(const Case& c);

// The case's tensors, to be filled by `Send` and compared as if K/V were inline.
RandomRequest MakeProblem(const Case& c, std::mt19937_64* random);

// Sends the case: makes its sequences, loads them, attends, deletes them.
absl::Status Send(const Case& c, Client* client, RandomRequest* problem);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_VERIFY_CASE_H_
