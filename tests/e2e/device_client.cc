// device_client LOCAL   decodes in the order of a CUDA stream with tensors on the GPU, and with
// tensors of the host, and compares the results to the bit. Exits with 0 if they are the same.
//
// The driver may be that of tests/client/fake_cuda.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "flashcore/client.h"
#include "kernels/half.h"

namespace flashcore {
namespace {

constexpr uint32_t kHeads = 4, kKvHeads = 2, kHeadDim = 64, kLayers = 3;
constexpr int kSteps = 50;              // with kLayers more requests than the ring has slots
constexpr size_t kRoomBytes = 1 << 12;  // of each tensor of a request

using Bytes = std::vector<std::byte>;

[[noreturn]] void Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T OrDie(const char* what, absl::StatusOr<T> result) {
  if (!result.ok()) Fail(what, result.status());
  return *std::move(result);
}

// A function of the driver; each returns a CUresult.
template <typename... Args>
void Call(const char* name, Args... args) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  auto* const function = reinterpret_cast<int (*)(Args...)>(dlsym(driver, name));
  if (function == nullptr || function(args...) != 0) Fail(name, absl::InternalError("failed"));
}

// So that the fake driver has the fake server's GPU.
void NameFakeGpu() {
  void* const name = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_cuda_set_gpus");
  if (name == nullptr) return;
  const uint8_t uuid[16] = "fake GPU 0";
  reinterpret_cast<void (*)(int, const uint8_t*)>(name)(1, uuid);
}

struct Step {
  Bytes query, key, value, output;
  std::vector<float> lse;
};

AttendRequest RequestOf(const Sequence& sequence, uint32_t layer, int step) {
  AttendRequest request;
  request.spans = {{1, 1, sequence.id(), static_cast<uint64_t>(step)}};
  request.num_heads = kHeads;
  request.num_kv_heads = kKvHeads;
  request.head_dim = kHeadDim;
  request.layer = layer;
  return request;
}

Bytes Random(size_t bytes, std::mt19937* random) {
  std::uniform_real_distribution<float> element(-1, 1);
  Bytes tensor(bytes);
  for (size_t i = 0; i < bytes; i += 2) {
    const uint16_t half = kernels::FromFloat(kernels::DType::kFloat16, element(*random));
    std::memcpy(&tensor[i], &half, 2);
  }
  return tensor;
}

std::vector<Step> OnTheHost(Client* client) {
  const Sequence sequence =
      OrDie("CreateSequence", client->CreateSequence({kLayers, kKvHeads, kHeadDim}));
  std::mt19937 random(1);
  std::vector<Step> steps;
  for (int i = 0; i < kSteps; ++i) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      AttendRequest request = RequestOf(sequence, layer, i);
      Step& step = steps.emplace_back();
      request.query = step.query = Random(request.QueryBytes(), &random);
      request.key = step.key = Random(request.KvBytes(), &random);
      request.value = step.value = Random(request.KvBytes(), &random);
      step.output.resize(request.QueryBytes());
      step.lse.resize(request.LseElements());
      request.output = absl::MakeSpan(step.output);
      request.lse = absl::MakeSpan(step.lse);
      const absl::Status status = client->Attend(request, nullptr);
      if (!status.ok()) Fail("Attend", status);
    }
  }
  return steps;
}

// The steps with the same inputs; outputs are of the GPU.
std::vector<Step> OnTheGpu(Client* client, std::vector<Step> steps) {
  const Sequence sequence =
      OrDie("CreateSequence", client->CreateSequence({kLayers, kKvHeads, kHeadDim}));
  const DeviceMemory memory =
      OrDie("AllocateDeviceMemory", client->AllocateDeviceMemory(steps.size() * 5 * kRoomBytes));
  void* stream = nullptr;
  Call("cuStreamCreate", &stream, 1u);
  std::byte* at = memory.address();
  const auto copy = [stream](void* to, const void* source, size_t bytes) {
    Call("cuMemcpyAsync", reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(source), bytes,
         stream);
  };
  const auto take = [&at] { return std::exchange(at, at + kRoomBytes); };
  const auto upload = [&](const Bytes& tensor) {
    std::byte* const to = take();
    copy(to, tensor.data(), tensor.size());
    return absl::MakeConstSpan(to, tensor.size());
  };
  std::deque<std::pair<absl::Notification, absl::Status>> answers(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    Step& step = steps[i];
    AttendRequest request = RequestOf(sequence, i % kLayers, static_cast<int>(i / kLayers));
    request.query = upload(step.query);
    request.key = upload(step.key);
    request.value = upload(step.value);
    request.output = {take(), step.output.size()};
    request.lse = {reinterpret_cast<float*>(take()), step.lse.size()};
    client->AttendOnCudaStream(request, stream,
                               [&answer = answers[i]](const absl::Status& status, AttendResult) {
                                 answer.second = status;
                                 answer.first.Notify();
                               });
    copy(step.output.data(), request.output.data(), step.output.size());
    copy(step.lse.data(), request.lse.data(), step.lse.size() * sizeof(float));
  }
  Call("cuStreamSynchronize", stream);
  for (auto& [done, status] : answers) {
    done.WaitForNotification();
    if (!status.ok()) Fail("AttendOnCudaStream", status);
  }
  Call("cuStreamDestroy_v2", stream);
  return steps;
}

int Run(const char* target) {
  const auto client = OrDie("Create", Client::Create(target));
  NameFakeGpu();
  void* context = nullptr;
  Call("cuInit", 0u);
  Call("cuDevicePrimaryCtxRetain", &context, 0);
  Call("cuCtxPushCurrent_v2", context);
  const std::vector<Step> want = OnTheHost(client.get());
  std::vector<Step> got = want;
  for (Step& step : got) {
    step.output.assign(step.output.size(), std::byte{0xff});
    step.lse.assign(step.lse.size(), -7);
  }
  got = OnTheGpu(client.get(), std::move(got));
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i].output == want[i].output && got[i].lse == want[i].lse) continue;
    Fail("results", absl::InternalError(absl::StrCat("request ", i, " differs")));
  }
  std::printf("%zu requests are the same to the bit\n", want.size());
  return 0;
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) { return argc == 2 ? flashcore::Run(argv[1]) : 2; }
