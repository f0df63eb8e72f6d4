// The C++ of README.md and client/README.md, in functions; readme_test.py compares the text.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "flashcore/client.h"
#include "flashcore/error_info.h"

using Bytes = absl::Span<const std::byte>;

void Readme(Bytes prompt_k, Bytes prompt_v, uint64_t prompt_rows, Bytes q, Bytes k, Bytes v,
            absl::Span<std::byte> o) {
  auto client = flashcore::Client::Create("127.0.0.1:7070");  // or "local:/tmp/flashcore.sock"
  auto sequence =
      (*client)->CreateSequence({/*num_layers=*/32, /*num_kv_heads=*/8, /*head_dim=*/64});
  auto appended = sequence->Append(/*layer=*/0, prompt_k, prompt_v, flashcore::Layout::kNHD,
                                   /*expected_length=*/0);
  flashcore::AttendRequest step;  // one decode step: appends one row, attends to all
  step.spans = {
      {/*query_rows=*/1, /*kv_rows=*/1, /*sequence_id=*/{}, /*expected_length=*/prompt_rows}};
  step.num_heads = 8;
  step.query = q, step.key = k, step.value = v, step.output = o;  // FP16 [1, 8, 64]
  absl::Status status = sequence->Attend(step, /*result=*/nullptr);
}

void ClientReadme(Bytes prompt_k, Bytes prompt_v, uint64_t prompt_rows, flashcore::Layout layout,
                  Bytes q, Bytes k, Bytes v, absl::Span<std::byte> o) {
  auto client = flashcore::Client::Create("127.0.0.1:7070");  // or "unix:/tmp/flashcore.sock"
  flashcore::AttendRequest request;
  request.spans = {{/*query_rows=*/512, /*kv_rows=*/512}};
  request.num_heads = request.num_kv_heads = 8;
  request.head_dim = 64;
  request.query = q, request.key = k, request.value = v, request.output = o;  // FP16 [512, 8, 64]
  flashcore::AttendResult result;
  absl::Status status = (*client)->Attend(request, &result);  // result.timing: the server's phases

  auto sequence =
      (*client)->CreateSequence({/*num_layers=*/32, /*num_kv_heads=*/8, /*head_dim=*/64});
  auto appended = sequence->Append(/*layer=*/0, prompt_k, prompt_v, flashcore::Layout::kNHD,
                                   /*expected_length=*/0);
  request.spans = {
      {/*query_rows=*/1, /*kv_rows=*/1, /*sequence_id=*/{}, /*expected_length=*/prompt_rows}};
  status = sequence->Attend(request, &result);  // appends a row, attends to all rows
  auto beam = sequence->Fork();                 // shares the pages
  auto info = sequence->Truncate(prompt_rows);
  status = sequence->Delete();

  using Op = flashcore::SequenceOperation;  // a step of beam search: one call
  auto beams =
      (*client)->ManageSequences({Op::Fork(*sequence), Op::Fork(*beam), Op::Delete(*beam)});
  auto next = (*beams)[0].sequence;  // or why this operation failed

  auto stream = (*client)->OpenStream();
  request.request_id = "step-1";  // unique among the requests in flight
  status = stream->Send(request, [](absl::Status, flashcore::AttendResult) { /* ... */ });
  status = stream->Finish();  // waits for all callbacks

  auto memory = (*client)->CreateSharedMemory(4 << 20);
  request.query = {(*memory)->data(), q.size()};  // at a multiple of 16 bytes from data()

  sequence->OnLost([&](const auto& lost) -> absl::StatusOr<flashcore::Sequence> {
    auto created = (*client)->CreateSequence(lost);  // reaches another server
    if (!created.ok()) return created;
    auto loaded = created->Append(/*layer=*/0, k, v, layout);  // all rows so far, for every layer
    if (!loaded.ok()) return loaded.status();
    return created;
  });
}

void Security() {
  flashcore::ClientOptions options;
  options.tls = flashcore::TlsOptions{"/etc/flashcore/ca.crt"};
  options.token_file = "/run/secrets/flashcore-token";
  auto client = flashcore::Client::Create("attention.example:7070", options);
}

void DropSequences(const std::string& /*needed_bytes*/) {}
void Reload(const std::string& /*sequence_ids*/) {}

void Reasons(const absl::Status& status) {
  const flashcore::ErrorInfo info = flashcore::GetErrorInfo(status);
  if (info.reason == "KV_FULL") {
    DropSequences(info.metadata.at("needed_bytes"));  // bytes, decimal
  } else if (info.reason == "SEQUENCE_LOST") {
    Reload(info.metadata.at("sequence_ids"));  // hexadecimal, separated by commas
  }
}

void LocalSocket() {
  auto client = flashcore::Client::Create("local:/run/flashcore/local.sock");
  auto memory = (*client)->CreateSharedMemory(4 << 20);  // tensors there are used in place
}

void WriteQkv(uint32_t /*layer*/, std::byte* /*memory*/, void* /*stream*/) {}
void ReadOutput(uint32_t /*layer*/, std::byte* /*memory*/, void* /*stream*/) {}

void DeviceTensors(const std::unique_ptr<flashcore::Client>* client, size_t bytes, uint32_t layers,
                   flashcore::AttendRequest request, Bytes q, void* stream,
                   const flashcore::Client::AttendCallback& tell_error) {
  auto memory = (*client)->AllocateDeviceMemory(bytes);  // a server with --local_device_tensors
  for (request.layer = 0; request.layer < layers; ++request.layer) {
    WriteQkv(request.layer, memory->address(), stream);  // a kernel
    request.query = {memory->address(), q.size()};       // and key, value, output
    (*client)->AttendOnCudaStream(request, stream, tell_error);
    ReadOutput(request.layer, memory->address(), stream);  // a kernel
  }
}

// All that can run without a server.
int main() {
  flashcore::ClientOptions options;
  options.retry.max_attempts = 1;
  auto client = flashcore::Client::Create("local:/nonexistent/flashcore.sock", options);
  const absl::Status status = (*client)->GetServerInfo().status();
  std::puts(status.ToString().c_str());
  return absl::IsUnavailable(status) ? 0 : 1;
}
