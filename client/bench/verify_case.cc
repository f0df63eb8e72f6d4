#include "client/bench/verify_case.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/flag_types.h"
#include "client/cpp/encode.h"

namespace flashcore::cli {
namespace {

// Most multiply-adds of a case: the float64 reference takes some milliseconds for a short case, and
// some hundred for a long one.
constexpr uint64_t kMaxShortWork = 3'000'000;
constexpr uint64_t kMaxLongWork = 10'000'000;
constexpr uint64_t kMaxLongKvBytes = uint64_t{36} << 20;  // K and V of all spans
constexpr uint32_t kSplitRows = 512;  // the kernels cut K/V, and share prefixes, at multiples of it
// Spans over a shared prefix. A short prefix needs several: the CPU device shares K/V only where
// enough work is left for each thread.
constexpr uint32_t kManySpans = 4, kMaxSpans = 12;
constexpr int kTries = 1000;  // before the rows of a long case are halved
// A batch of up to this many packed rows for each KV head is a decode, whose K/V is split and
// shared.
constexpr uint32_t kMaxDecodeRows = 16;

template <typename T>
T Pick(const std::vector<T>& values, std::mt19937_64* random) {
  return values[(*random)() % values.size()];
}

// From `first` to `last`, both included.
uint32_t Between(uint32_t first, uint32_t last, std::mt19937_64* random) {
  return first + static_cast<uint32_t>((*random)() % (uint64_t{last} - first + 1));
}

uint64_t Work(const AttendRequest& shape) {
  uint64_t pairs = 0;
  for (const SpanShape& span : shape.spans) pairs += uint64_t{span.query_rows} * span.kv_rows;
  return pairs * shape.num_heads * shape.head_dim;
}

Mask RandomMask(std::mt19937_64* random) {
  switch ((*random)() % 4) {
    case 0:
      return Mask::None();
    case 1:
      return Mask::SlidingWindow(Pick<int32_t>({0, 1, 17, 63, 64, 100}, random),
                                 Pick<int32_t>({0, 1, 64}, random));
    default:
      return Mask::Causal();
  }
}

void SetRandomTerms(std::mt19937_64* random, AttendRequest* shape) {
  shape->mask = RandomMask(random);
  if ((*random)() % 4 == 0) shape->softmax_scale = Pick<float>({0.0f, 0.05f, -0.1f, 0.5f}, random);
}

// Its windows end at, beside and between the boundaries of splits.
Mask RandomLongMask(uint32_t kv_rows, std::mt19937_64* random) {
  const auto any = static_cast<int32_t>(Between(512, std::max<uint32_t>(kv_rows, 512), random));
  switch ((*random)() % 4) {
    case 0:
      return Mask::None();
    case 1:
      return Mask::SlidingWindow(Pick<int32_t>({512, 1000, 1023, 1024, any, any}, random),
                                 Pick<int32_t>({0, 0, 1, 64}, random));
    default:
      return Mask::Causal();
  }
}

// Lengths around the 64-row tile, where kernels fail first, and a random one.
uint32_t RandomRows(bool may_be_zero, std::mt19937_64* random) {
  const uint32_t any = Between(1, 300, random);
  const uint32_t rows =
      Pick<uint32_t>({0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 257, any, any, any}, random);
  return rows == 0 && !may_be_zero ? 1 : rows;
}

// Lengths around splits and powers of two.
uint32_t RandomLongRows(std::mt19937_64* random) {
  const uint32_t any = Between(1000, kMaxVerifyRows, random);
  return Pick<uint32_t>({1023, 1024, 1025, 2000, 4095, 4097, 8193, 16385, 32767, 32769, any, any},
                        random);
}

// Prefixes of whole splits, of nearly whole ones, and of any length: at least one split.
uint32_t RandomPrefixRows(std::mt19937_64* random) {
  const uint32_t whole = Between(1, 4, random) * kSplitRows;
  const uint32_t any = Between(0, kSplitRows - 1, random);
  return Pick<uint32_t>({whole, whole + any, whole + kSplitRows - Between(1, 63, random)}, random);
}

void RandomHeads(const Abilities& server, const std::vector<uint32_t>& kv_heads,
                 std::mt19937_64* random, AttendRequest* shape) {
  const auto& head_dims = server.limits.head_dims();
  shape->head_dim = head_dims[static_cast<int>((*random)() % head_dims.size())];
  shape->num_kv_heads = Pick(kv_heads, random);
  shape->num_heads = shape->num_kv_heads * Pick<uint32_t>({1, 1, 2, 4, 7, 8}, random);
}

uint32_t RandomSpans(uint32_t least, uint32_t most, const v1::Limits& limits,
                     std::mt19937_64* random) {
  most = std::min(most, std::max<uint32_t>(1, limits.max_spans()));
  if (limits.client_sequences() > 0) most = std::min(most, limits.client_sequences());
  return Between(std::min(least, most), most, random);
}

void MakeShort(const Abilities& server, std::mt19937_64* random, Case* out) {
  AttendRequest& shape = out->shape;
  SetRandomTerms(random, &shape);
  out->magnitude = server.float16_sums ? 1 : Pick<float>({1, 1, 1, 4, 16}, random);
  do {
    RandomHeads(server, {1, 2, 3, 4}, random, &shape);
    shape.spans.clear();
    for (uint32_t i = 0, n = RandomSpans(1, 4, server.limits, random); i < n; ++i) {
      shape.spans.push_back({RandomRows(false, random), RandomRows(true, random)});
    }
  } while (Work(shape) > kMaxShortWork || shape.num_heads > server.limits.max_heads());
}

// Spans of `kv_rows` rows, and up to 64 more behind a shared prefix. Elements are in [-1, 1] and
// the scale is the usual one, so all rows have about the same weight and each of them counts.
void MakeLong(const Abilities& server, uint32_t kv_rows, std::mt19937_64* random, Case* out) {
  AttendRequest& shape = out->shape;
  out->each_span = true;  // they have many rows, so their errors average
  const bool forked = out->place == KvPlace::kForked;
  const uint64_t request_bytes = std::max<uint64_t>(server.limits.max_message_bytes(), 4 << 20);
  const uint64_t most =
      std::min(kMaxLongKvBytes, out->place == KvPlace::kInline ? request_bytes - request_bytes / 8
                                                               : server.kv_bytes);
  for (int tries = 1;; ++tries) {
    if (tries % kTries == 0) kv_rows = std::max<uint32_t>(1, kv_rows / 2);
    RandomHeads(server, {1, 1, 2}, random, &shape);
    shape.spans.clear();
    const uint32_t spans = forked ? RandomSpans(kv_rows > 4 * kSplitRows ? 2 : kManySpans,
                                                kMaxSpans, server.limits, random)
                                  : RandomSpans(1, 2, server.limits, random);
    const uint32_t query_rows = forked ? 1 : Pick<uint32_t>({1, 1, 2, 5}, random);
    for (uint32_t i = 0; i < spans; ++i) {
      shape.spans.push_back({query_rows, kv_rows + (forked ? Between(0, 64, random) : 0)});
    }
    out->prefix_rows = forked ? kv_rows : 0;
    if (shape.num_heads > server.limits.max_heads()) continue;
    if (forked && shape.num_heads / shape.num_kv_heads > kMaxDecodeRows) continue;
    if (Work(shape) <= kMaxLongWork && 2 * shape.KvBytes() <= most) break;
    if (kv_rows == 1) break;  // a very small server; it refuses what it cannot hold
  }
  shape.mask = RandomLongMask(kv_rows, random);
}

// Rows that the request appends to each span. The others are loaded before.
void PickAppendedRows(std::mt19937_64* random, Case* out) {
  for (const SpanShape& span : out->shape.spans) {
    const uint32_t own = span.kv_rows - out->prefix_rows;
    const uint32_t any = Between(0, std::min(own, uint32_t{100}), random);
    out->appended_rows.push_back(
        std::min({own, Pick<uint32_t>({0, 1, 1, any, any}, random), span.kv_rows}));
  }
}

// The sequences of a case. Deletes them at the end.
class CaseSequences {
 public:
  CaseSequences(const Case& c, Client* client) : case_(c), client_(client) {}
  CaseSequences(const CaseSequences&) = delete;
  CaseSequences& operator=(const CaseSequences&) = delete;
  ~CaseSequences() {
    for (const Sequence& sequence : sequences_) sequence.Delete().IgnoreError();
  }

  // Loads all rows that the request does not append.
  absl::Status Load(const RandomRequest& problem, const AttendRequest& whole) {
    for (size_t i = 0; i < whole.spans.size(); ++i) {
      if (absl::Status status = Create(); !status.ok()) return status;
      if (i > 0) continue;
      absl::Status status = Append(problem, whole, 0, 0, case_.prefix_rows);
      if (!status.ok()) return status;
    }
    for (size_t i = 0; i < whole.spans.size(); ++i) {
      absl::Status status = Append(problem, whole, i, case_.prefix_rows, LoadedRows(i));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  uint64_t LoadedRows(size_t i) const {
    return case_.shape.spans[i].kv_rows - case_.appended_rows[i];
  }
  const Sequence& operator[](size_t i) const { return sequences_[i]; }

 private:
  absl::Status Create() {
    SequenceOptions options;
    options.num_kv_heads = case_.shape.num_kv_heads;
    options.head_dim = case_.shape.head_dim;
    options.dtype = case_.shape.dtype;
    options.kv_dtype = case_.kv_dtype;
    if (!sequences_.empty()) {  // those of one request are on one device of one server
      options.device_id = sequences_[0].options().device_id;
      options.affinity = sequences_[0].options().affinity;
    }
    absl::StatusOr<Sequence> sequence = case_.place == KvPlace::kForked && !sequences_.empty()
                                            ? sequences_[0].Fork(case_.prefix_rows)
                                            : client_->CreateSequence(options);
    if (!sequence.ok()) return sequence.status();
    sequences_.push_back(*std::move(sequence));
    return absl::OkStatus();
  }

  absl::Status Append(const RandomRequest& problem, const AttendRequest& whole, size_t i,
                      uint64_t first, uint64_t last) const {
    if (first == last) return absl::OkStatus();
    return sequences_[i]
        .Append(/*layer=*/0, Bytes(KvRows(whole, problem.key(), i, first, last)),
                Bytes(KvRows(whole, problem.value(), i, first, last)), whole.layout, first)
        .status();
  }

  const Case& case_;
  Client* const client_;
  std::vector<Sequence> sequences_;  // of the spans
};

absl::Status SendResident(const Case& c, Client* client, RandomRequest* problem) {
  const AttendRequest whole = problem->request();
  CaseSequences sequences(c, client);
  absl::Status status = sequences.Load(*problem, whole);
  if (!status.ok()) return status;
  AttendRequest request = whole;
  std::vector<uint16_t> key, value;
  for (size_t i = 0; i < whole.spans.size(); ++i) {
    const uint64_t loaded = sequences.LoadedRows(i), all = whole.spans[i].kv_rows;
    request.spans[i] = {whole.spans[i].query_rows, c.appended_rows[i], sequences[i].id(), loaded};
    for (const auto& [from, to] :
         {std::pair(&problem->key(), &key), std::pair(&problem->value(), &value)}) {
      const std::vector<uint16_t> rows = KvRows(whole, *from, i, loaded, all);
      to->insert(to->end(), rows.begin(), rows.end());
    }
  }
  request.key = Bytes(key);
  request.value = Bytes(value);
  CallOptions call;
  call.affinity = sequences[0].options().affinity;
  return client->Attend(request, nullptr, call);
}

std::string DescribePlace(const Case& c) {
  if (c.place == KvPlace::kInline) return " inline";
  std::string rows;
  for (const uint32_t appended : c.appended_rows) {
    absl::StrAppend(&rows, rows.empty() ? "" : ",", appended);
  }
  const std::string place =
      c.place == KvPlace::kForked ? absl::StrCat(" forked=", c.prefix_rows) : " resident";
  const bool is_8bit = c.kv_dtype != KvDType::kSameAsQuery;
  return absl::StrCat(place, is_8bit ? absl::StrCat(" ", AbslUnparseFlag(c.kv_dtype)) : "",
                      " appended=", rows);
}

}  // namespace

Abilities::Abilities(const v1::GetServerInfoResponse& info) : limits(info.limits()) {
  for (const v1::KernelInfo& kernel : info.kernels()) {
    const DType dtype = client::FromProto(kernel.dtype());
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
    float16_sums |= kernel.accumulate() == "float16";
    const KvDType kv_dtype = client::FromProto(kernel.kv_dtype());
    if (kv_dtype == KvDType::kSameAsQuery) continue;
    std::vector<KvDType>& stored = kv_dtypes[kernel.head_dim()];
    if (std::find(stored.begin(), stored.end(), kv_dtype) == stored.end()) {
      stored.push_back(kv_dtype);
    }
    if (kv_dtype != KvDType::kInt8) continue;
    std::vector<Precision>& accepted = precisions[kernel.head_dim()];
    const Precision precision = client::FromProto(kernel.precision());
    if (std::find(accepted.begin(), accepted.end(), precision) == accepted.end()) {
      accepted.push_back(precision);
    }
  }
  if (info.devices().empty()) return;
  kv_bytes = std::numeric_limits<uint64_t>::max();
  for (const v1::DeviceInfo& device : info.devices()) {
    kv_bytes = std::min(kv_bytes, (device.kv_memory_bytes() - device.kv_used_bytes()) / 4);
  }
  if (limits.client_kv_bytes() > 0) kv_bytes = std::min(kv_bytes, limits.client_kv_bytes() / 2);
}

Case RandomCase(const Abilities& server, int number, std::mt19937_64* random) {
  Case out;
  AttendRequest& shape = out.shape;
  shape.dtype = Pick(server.dtypes, random);
  shape.layout = Pick<Layout>({Layout::kNHD, Layout::kHND}, random);
  out.lse = (*random)() % 2 == 0;
  const uint32_t long_rows = number <= 10 ? kMaxVerifyRows : RandomLongRows(random);
  switch (number % 10) {
    case 3:
      out.place = KvPlace::kResident;
      MakeShort(server, random, &out);
      break;
    case 5:
      MakeLong(server, long_rows, random, &out);
      break;
    case 6:
      out.place = KvPlace::kForked;
      MakeLong(server, RandomPrefixRows(random), random, &out);
      break;
    case 8:
      out.place = KvPlace::kForked;
      MakeLong(server, long_rows, random, &out);
      break;
    case 0:
      out.place = KvPlace::kResident;
      MakeLong(server, long_rows, random, &out);
      break;
    default:
      MakeShort(server, random, &out);
  }
  if (out.place == KvPlace::kInline) return out;
  const auto stored = server.kv_dtypes.find(shape.head_dim);
  if (stored != server.kv_dtypes.end() && (*random)() % 2 == 0) {
    out.kv_dtype = Pick(stored->second, random);
  }
  if (out.kv_dtype == KvDType::kInt8) {
    const std::vector<Precision>& accepted = server.precisions.at(shape.head_dim);
    shape.precision = accepted[static_cast<size_t>(number + number / 10) % accepted.size()];
    // With large scores, rounding Q may cost all of O.
    if (shape.precision != Precision::k16Bit) out.magnitude = 1;
  }
  PickAppendedRows(random, &out);
  return out;
}

std::string Describe(const Case& c) {
  std::string spans;
  for (const SpanShape& span : c.shape.spans) {
    absl::StrAppend(&spans, spans.empty() ? "" : ",", span.query_rows, "/", span.kv_rows);
  }
  return absl::StrCat(AbslUnparseFlag(c.shape.dtype), " d=", c.shape.head_dim,
                      " h=", c.shape.num_heads, "/", c.shape.num_kv_heads, " ",
                      AbslUnparseFlag(c.shape.layout), " ", AbslUnparseFlag(c.shape.mask),
                      " rows=", spans, DescribePlace(c), " magnitude=", c.magnitude,
                      c.shape.softmax_scale ? absl::StrCat(" scale=", *c.shape.softmax_scale) : "",
                      c.shape.precision == Precision::k16Bit
                          ? ""
                          : absl::StrCat(" precision=", AbslUnparseFlag(c.shape.precision)),
                      c.lse ? " lse" : "");
}

RandomRequest MakeProblem(const Case& c, std::mt19937_64* random) {
  return RandomRequest(c.shape, c.lse, c.magnitude, random, c.prefix_rows);
}

absl::Status Send(const Case& c, Client* client, RandomRequest* problem) {
  if (c.place == KvPlace::kInline) return client->Attend(problem->request(), nullptr);
  return SendResident(c, client, problem);
}

}  // namespace flashcore::cli
