#include "tests/client/fake_sequences.h"

#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/bench/reply_check.h"
#include "kernels/oracle/reference.h"
#include "tests/client/set_terms.h"

namespace flashcore {
namespace {

grpc::Status NotFound() { return {grpc::StatusCode::NOT_FOUND, "sequence_id: unknown"}; }

grpc::Status WrongLength(uint64_t length, uint64_t expected) {
  return {grpc::StatusCode::FAILED_PRECONDITION,
          absl::StrCat("expected_length: ", expected, "; the sequence has ", length, " rows")};
}

// `rows` rows of `heads` heads, in NHD whatever the layout they came in.
std::string ToNhd(const std::string& bytes, v1::Layout layout, uint64_t rows, uint64_t heads) {
  if (layout == v1::LAYOUT_NHD || rows == 0) return bytes;
  const size_t piece = bytes.size() / (rows * heads);
  std::string out;
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t head = 0; head < heads; ++head) {
      out.append(bytes, (head * rows + row) * piece, piece);
    }
  }
  return out;
}

// The request without its K/V rows; the tensors are `query`, `output` and `lse`.
AttendRequest ToClient(const v1::AttendRequest& request, std::string* output,
                       std::vector<float>* lse) {
  AttendRequest out;
  for (const v1::Span& span : request.spans()) out.spans.push_back({span.query_rows(), 0});
  out.dtype = request.dtype() == v1::DTYPE_FLOAT16 ? DType::kFloat16 : DType::kBFloat16;
  out.num_heads = request.num_heads();
  out.num_kv_heads = request.num_kv_heads();
  out.head_dim = request.head_dim();
  out.layout = request.layout() == v1::LAYOUT_NHD ? Layout::kNHD : Layout::kHND;
  SetTerms(request, &out);
  const auto* query = reinterpret_cast<const std::byte*>(request.query().data());
  out.query = absl::MakeSpan(query, request.query().size());
  out.output = absl::MakeSpan(reinterpret_cast<std::byte*>(output->data()), output->size());
  if (request.return_lse()) lse->resize(out.LseElements());
  out.lse = absl::MakeSpan(*lse);
  return out;
}

// Attends with one span over NHD rows of K and V, into the span's output and LSE.
void AttendSpan(const kernels::Geometry& geometry, kernels::Span span, const std::string& key,
                const std::string& value) {
  const int64_t row_bytes = int64_t{geometry.num_kv_heads} * geometry.head_dim * 2;
  span.kv.key = reinterpret_cast<const std::byte*>(key.data());
  span.kv.value = reinterpret_cast<const std::byte*>(value.data());
  span.kv.rows = static_cast<int32_t>(key.size() / row_bytes);
  span.kv.row_stride = row_bytes;
  span.kv.page_stride = kernels::kPageTokens * row_bytes;
  span.kv.head_stride = geometry.head_dim * 2;
  const kernels::AttentionBatch batch{geometry, &span, 1};
  kernels::StoreResult(kernels::ReferenceAttention(batch), batch);
}

// Runs the operation by the handler of its RPC.
grpc::Status Run(const FakeServer& server, grpc::ServerContext* context,
                 const v1::SequenceOperation& operation, v1::SequenceResult* result) {
  const auto run = [&](const auto& handler, const auto& request, auto response) {
    grpc::Status status = handler(context, request, &response);
    if (status.ok()) *result->mutable_sequence() = response.sequence();
    return status;
  };
  if (operation.has_create()) {
    return run(server.on_create, operation.create(), v1::CreateSequenceResponse());
  }
  if (operation.has_fork()) {
    return run(server.on_fork, operation.fork(), v1::ForkSequenceResponse());
  }
  if (operation.has_truncate()) {
    return run(server.on_truncate, operation.truncate(), v1::TruncateSequenceResponse());
  }
  if (operation.has_get()) return run(server.on_get, operation.get(), v1::GetSequenceResponse());
  v1::DeleteSequenceResponse nothing;
  return server.on_delete(context, operation.delete_(), &nothing);
}

}  // namespace

void FakeSequences::Install(FakeServer* server) {
  server->on_create = [this](auto*, const auto& request, auto* response) {
    return Create(request, response);
  };
  server->on_fork = [this](auto*, const auto& request, auto* response) {
    return Fork(request, response);
  };
  server->on_load = [this](auto* reader, auto* response) { return Load(reader, response); };
  server->on_truncate = [this](auto*, const auto& request, auto* response) {
    return Truncate(request, response);
  };
  server->on_attend = [this](auto*, const auto& request, auto* response) {
    return Attend(request, response);
  };
  server->on_stream = [this](auto* stream) { return AttendStream(stream); };
  server->on_delete = [this](auto*, const v1::DeleteSequenceRequest& request, auto*) {
    absl::MutexLock lock(&mutex_);
    return sequences_.erase(request.sequence_id()) == 1 ? grpc::Status::OK : NotFound();
  };
  server->on_get = [this](auto*, const v1::GetSequenceRequest& request, auto* response) {
    absl::MutexLock lock(&mutex_);
    const Sequence* sequence = Find(request.sequence_id());
    if (sequence == nullptr) return NotFound();
    *response->mutable_sequence() = InfoOf(*sequence);
    return grpc::Status::OK;
  };
  server->on_list = [this](auto*, const auto&, v1::ListSequencesResponse* response) {
    absl::MutexLock lock(&mutex_);
    for (const auto& entry : sequences_) *response->add_sequences() = InfoOf(entry.second);
    return grpc::Status::OK;
  };
  server->on_manage = [server](auto* context, const v1::ManageSequencesRequest& request,
                               v1::ManageSequencesResponse* response) {
    for (const v1::SequenceOperation& operation : request.operations()) {
      v1::SequenceResult* result = response->add_results();
      const grpc::Status status = Run(*server, context, operation, result);
      result->mutable_status()->ParseFromString(status.error_details());
      result->mutable_status()->set_code(status.error_code());
      result->mutable_status()->set_message(status.error_message());
    }
    return grpc::Status::OK;
  };
}

size_t FakeSequences::size() const {
  absl::MutexLock lock(&mutex_);
  return sequences_.size();
}

void FakeSequences::Clear() {
  absl::MutexLock lock(&mutex_);
  sequences_.clear();
}

std::string FakeSequences::key(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  return sequences_.at(id).layers[0].key;
}

std::string FakeSequences::value(const std::string& id) const {
  absl::MutexLock lock(&mutex_);
  return sequences_.at(id).layers[0].value;
}

grpc::Status FakeSequences::Create(const v1::CreateSequenceRequest& request,
                                   v1::CreateSequenceResponse* response) {
  Sequence sequence;
  sequence.info.set_num_layers(request.num_layers());
  sequence.info.set_num_kv_heads(request.num_kv_heads());
  sequence.info.set_head_dim(request.head_dim());
  sequence.info.set_dtype(request.dtype());
  sequence.info.set_kv_dtype(request.kv_dtype());
  sequence.info.set_pin(request.pin());
  sequence.info.set_device_id(request.device_id());
  sequence.layers.resize(request.num_layers());
  absl::MutexLock lock(&mutex_);
  if (request.device_id().empty()) {
    sequence.info.set_device_id(created_ % 2 == 0 ? "fake:0" : "fake:1");
  }
  response->set_sequence_id(Insert(std::move(sequence)));
  *response->mutable_sequence() = InfoOf(sequences_.at(response->sequence_id()));
  return grpc::Status::OK;
}

grpc::Status FakeSequences::Fork(const v1::ForkSequenceRequest& request,
                                 v1::ForkSequenceResponse* response) {
  absl::MutexLock lock(&mutex_);
  const Sequence* parent = Find(request.sequence_id());
  if (parent == nullptr) return NotFound();
  Sequence child = *parent;
  child.info.set_pin(request.pin());
  if (request.has_length()) Cut(request.length(), &child);
  response->set_sequence_id(Insert(std::move(child)));
  *response->mutable_sequence() = InfoOf(sequences_.at(response->sequence_id()));
  return grpc::Status::OK;
}

grpc::Status FakeSequences::Load(FakeServer::LoadReader* reader,
                                 v1::LoadSequenceResponse* response) {
  std::string id;
  v1::LoadSequenceRequest request;
  while (reader->Read(&request)) {
    if (id.empty()) id = request.sequence_id();
    absl::MutexLock lock(&mutex_);
    Sequence* sequence = Find(id);
    if (sequence == nullptr) return NotFound();
    const uint64_t length = Length(*sequence, request.layer());
    if (request.has_expected_length() && request.expected_length() != length) {
      return WrongLength(length, request.expected_length());
    }
    Layer& layer = sequence->layers[request.layer()];
    const uint32_t heads = sequence->info.num_kv_heads();
    layer.key += ToNhd(request.key(), request.layout(), request.rows(), heads);
    layer.value += ToNhd(request.value(), request.layout(), request.rows(), heads);
    *response->mutable_sequence() = InfoOf(*sequence);
  }
  return grpc::Status::OK;
}

grpc::Status FakeSequences::Truncate(const v1::TruncateSequenceRequest& request,
                                     v1::TruncateSequenceResponse* response) {
  absl::MutexLock lock(&mutex_);
  Sequence* sequence = Find(request.sequence_id());
  if (sequence == nullptr) return NotFound();
  const uint64_t length = Length(*sequence, 0);
  if (request.has_expected_length() && request.expected_length() != length) {
    return WrongLength(length, request.expected_length());
  }
  if (request.length() > length) return {grpc::StatusCode::INVALID_ARGUMENT, "length: too long"};
  Cut(request.length(), sequence);
  *response->mutable_sequence() = InfoOf(*sequence);
  return grpc::Status::OK;
}

grpc::Status FakeSequences::Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
  std::string output(request.query().size(), '\0');
  std::vector<float> lse;
  const cli::KernelBatch batch = cli::ToKernelBatch(ToClient(request, &output, &lse));
  const uint64_t row_bytes = uint64_t{request.num_kv_heads()} * request.head_dim() * 2;
  absl::MutexLock lock(&mutex_);
  std::set<std::string> devices;
  for (const v1::Span& span : request.spans()) {
    if (span.sequence_id().empty()) continue;
    const Sequence* sequence = Find(span.sequence_id());
    if (sequence == nullptr) return NotFound();
    devices.insert(sequence->info.device_id());
    if (devices.size() > 1) return {grpc::INVALID_ARGUMENT, "sequences of two devices"};
    const uint64_t length = Length(*sequence, request.layer());
    if (span.has_expected_length() && span.expected_length() != length) {
      return WrongLength(length, span.expected_length());
    }
  }
  size_t offset = 0;
  std::vector<uint64_t> lengths;
  for (int i = 0; i < request.spans_size(); ++i) {
    const v1::Span& span = request.spans(i);
    const uint64_t bytes = span.kv_rows() * row_bytes;
    const auto rows = [&](const std::string& tensor) {
      return ToNhd(tensor.substr(offset, bytes), request.layout(), span.kv_rows(),
                   request.num_kv_heads());
    };
    Layer inline_rows;
    Layer* layer = &inline_rows;
    if (Sequence* s = Find(span.sequence_id())) layer = &s->layers[request.layer()];
    layer->key += rows(request.key());
    layer->value += rows(request.value());
    offset += bytes;
    Attention attention{batch.geometry, batch.spans[static_cast<size_t>(i)], layer->key,
                        layer->value, layer != &inline_rows};
    if (fault != nullptr) fault(&attention);
    AttendSpan(batch.geometry, attention.span, attention.key, attention.value);
    lengths.push_back(layer == &inline_rows ? 0 : layer->key.size() / row_bytes);
  }
  if (!devices.empty()) {  // not all K/V is inline
    response->mutable_sequence_lengths()->Assign(lengths.begin(), lengths.end());
  }
  response->set_request_id(request.request_id());
  response->set_output(std::move(output));
  response->set_lse(lse.data(), lse.size() * sizeof(float));
  return grpc::Status::OK;
}

grpc::Status FakeSequences::AttendStream(FakeServer::Stream* stream) {
  v1::AttendRequest request;
  while (stream->Read(&request)) {
    v1::AttendResponse response;
    ++streamed_;
    const grpc::Status status = Attend(request, &response);
    response.set_request_id(request.request_id());
    response.mutable_status()->set_code(status.error_code());
    response.mutable_status()->set_message(status.error_message());
    stream->Write(response);
  }
  return grpc::Status::OK;
}

FakeSequences::Sequence* FakeSequences::Find(const std::string& id) {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : &it->second;
}

std::string FakeSequences::Insert(Sequence sequence) {
  std::string id = absl::StrFormat("id-%013d", ++created_);
  sequence.info.set_sequence_id(id);
  sequences_.emplace(id, std::move(sequence));
  return id;
}

uint64_t FakeSequences::Length(const Sequence& sequence, uint32_t layer) {
  return sequence.layers[layer].key.size() /
         (uint64_t{sequence.info.num_kv_heads()} * sequence.info.head_dim() * 2);
}

void FakeSequences::Cut(uint64_t length, Sequence* sequence) {
  const uint64_t bytes = length * sequence->info.num_kv_heads() * sequence->info.head_dim() * 2;
  for (Layer& layer : sequence->layers) {
    layer.key.resize(bytes);
    layer.value.resize(bytes);
  }
}

v1::SequenceInfo FakeSequences::InfoOf(const Sequence& sequence) {
  v1::SequenceInfo info = sequence.info;
  for (uint32_t layer = 0; layer < info.num_layers(); ++layer) {
    info.add_layer_lengths(Length(sequence, layer));
    info.set_kv_bytes(info.kv_bytes() + 2 * sequence.layers[layer].key.size());
  }
  return info;
}

}  // namespace flashcore
