#include "client/cli/resident_context.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace flashcore::cli {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 19;  // of K, and of V, made and sent at a time

absl::Span<const std::byte> Bytes(absl::Span<const uint16_t> elements) {
  return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * sizeof(uint16_t)};
}

// Appends rows [first, last) of the source to a sequence that has `first` rows.
absl::Status Load(const Sequence& sequence, const RowSource& source, Layout layout, uint64_t first,
                  uint64_t last) {
  const uint32_t heads = sequence.options().num_kv_heads;
  const uint64_t piece_rows = std::max<uint64_t>(1, kPieceBytes / sequence.RowBytes());
  std::vector<uint16_t> key, value;
  while (first < last) {
    const uint64_t rows = std::min(piece_rows, last - first);
    key.resize(rows * sequence.RowBytes() / sizeof(uint16_t));
    value.resize(key.size());
    source.Fill(Tensor::kKey, first, rows, heads, layout, absl::MakeSpan(key));
    source.Fill(Tensor::kValue, first, rows, heads, layout, absl::MakeSpan(value));
    const absl::Status status =
        sequence.Append(/*layer=*/0, Bytes(key), Bytes(value), layout, first).status();
    if (!status.ok()) return status;
    first += rows;
  }
  return absl::OkStatus();
}

absl::Status DeleteIfThere(std::optional<Sequence>* sequence) {
  if (!sequence->has_value()) return absl::OkStatus();
  absl::Status status = (*sequence)->Delete();
  sequence->reset();
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace

SharedPrefix::SharedPrefix(Client* client, const ContextShape& shape, uint64_t rows)
    : client_(client), shape_(shape), rows_(rows) {}

absl::StatusOr<Sequence> SharedPrefix::Fork(Client* client) {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<Sequence> fork = TryFork(client);
  if (!absl::IsNotFound(fork.status())) return fork;
  if (absl::Status status = Load(); !status.ok()) return status;
  return TryFork(client);
}

absl::StatusOr<Sequence> SharedPrefix::TryFork(Client* client) {
  if (!sequence_.has_value()) return absl::NotFoundError("the prefix is not loaded");
  const absl::StatusOr<Sequence> prefix =
      client->OpenSequence(sequence_->id(), {{}, sequence_->options().affinity});
  if (!prefix.ok()) return prefix.status();
  return prefix->Fork(rows_, shape_.sequence.pin);
}

absl::Status SharedPrefix::Load() {
  absl::StatusOr<Sequence> sequence = client_->CreateSequence(shape_.sequence);
  if (!sequence.ok()) return sequence.status();
  sequence_ = *std::move(sequence);
  const RowSource source(shape_.sequence.dtype, shape_.sequence.head_dim, kSeed);
  absl::Status status = cli::Load(*sequence_, source, shape_.layout, 0, rows_);
  if (!status.ok()) DeleteIfThere(&sequence_).IgnoreError();  // half of it is of no use
  return status;
}

absl::Status SharedPrefix::Delete() {
  absl::MutexLock lock(&mutex_);
  return DeleteIfThere(&sequence_);
}

ResidentContext::ResidentContext(Client* client, SharedPrefix* prefix, const ContextShape& shape,
                                 uint64_t seed)
    : client_(client),
      prefix_(prefix),
      shape_(shape),
      source_(shape.sequence.dtype, shape.sequence.head_dim, seed,
              prefix == nullptr ? 0 : prefix->rows(), SharedPrefix::kSeed) {}

absl::Status ResidentContext::Restore(uint64_t rows, const std::string& device_id) {
  absl::StatusOr<uint64_t> length = Length();
  if (absl::IsNotFound(length.status())) {
    if (absl::Status status = Create(device_id); !status.ok()) return status;
    length = prefix_ == nullptr ? 0 : prefix_->rows();
  }
  if (!length.ok()) return length.status();
  if (*length > rows) return Truncate(rows, *length);
  return Load(*sequence_, source_, shape_.layout, *length, rows);
}

absl::Status ResidentContext::Truncate(uint64_t rows, uint64_t expected_length) {
  return sequence_->Truncate(rows, expected_length).status();
}

absl::Status ResidentContext::Delete() { return DeleteIfThere(&sequence_); }

absl::StatusOr<uint64_t> ResidentContext::Length() const {
  if (!sequence_.has_value()) return absl::NotFoundError("the sequence does not exist yet");
  const absl::StatusOr<v1::SequenceInfo> info = sequence_->Info();
  if (!info.ok()) return info.status();
  if (info->layer_lengths().size() != 1) {
    return absl::InternalError(
        absl::StrCat("reply: layer_lengths: ", info->layer_lengths().size(), "; want 1"));
  }
  return info->layer_lengths(0);
}

absl::Status ResidentContext::Create(const std::string& device_id) {
  SequenceOptions options = shape_.sequence;
  options.device_id = device_id;
  absl::StatusOr<Sequence> sequence =
      prefix_ == nullptr ? client_->CreateSequence(options) : prefix_->Fork(client_);
  if (sequence.ok()) sequence_ = *std::move(sequence);
  return sequence.status();
}

}  // namespace flashcore::cli
