// A SequenceStore without an engine: tests step through launches themselves, and K/V reads as text.
#ifndef FLASHCORE_TESTS_KV_SEQUENCE_STORE_FIXTURE_H_
#define FLASHCORE_TESTS_KV_SEQUENCE_STORE_FIXTURE_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/kv_pages.h"
#include "server/kv/operation.h"
#include "server/kv/sequence_store.h"
#include "tests/engine/fakes.h"

namespace flashcore::server::testing {

using OperationPtr = std::unique_ptr<AttendOperation>;

// A row of K/V is a character: every byte of its key, and every byte of its value inverted. So
// tests append text, and compare what a sequence holds with text.
//
// Pages and superblocks have 8 KiB, so memory of n * 8 KiB takes n pages.
class SequenceStoreTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kHeadDim = 32;
  static constexpr size_t kRowBytes = kHeadDim * 2;
  static constexpr size_t kPageBytes = 8192;

  SequenceStoreTest() { Open(); }

  // Replaces the store by one with room for `pages` pages.
  void Open(SequenceStore::Options options = {}, size_t pages = 32, size_t hot_pages = 0) {
    store_.reset();
    options.superblock_bytes = kPageBytes;
    options.dtypes = {kernels::DType::kFloat16};
    options.head_dims[kernels::KvDType::kSameAsQuery] = {kHeadDim, 64};
    memory_.input_bytes = pages * kPageBytes;
    memory_.inputs.Reset();
    EXPECT_EQ(staging_.Acquire(&memory_), absl::OkStatus());
    given_back_ = 0;
    const auto give_back = [this](std::byte* data, size_t bytes) {
      std::memset(data, 0, bytes);
      given_back_ += bytes;
    };
    store_ = std::make_unique<SequenceStore>(
        options,
        KvMemory{memory_.inputs.data(), pages * kPageBytes, hot_pages * kPageBytes, give_back},
        &clock_, &metrics_);
  }

  static SequenceShape Shape(uint32_t layers = 1) {
    return {layers, 1, kHeadDim, kernels::DType::kFloat16};
  }
  void OpenWith8Bit() {
    SequenceStore::Options options;
    options.head_dims = {{kernels::KvDType::kInt8, {kHeadDim}},
                         {kernels::KvDType::kFloat8E4M3, {kHeadDim}}};
    Open(options);
  }
  SequenceId Create8Bit(kernels::KvDType kv_dtype = kernels::KvDType::kInt8) {
    SequenceShape shape = Shape();
    shape.kv_dtype = kv_dtype;
    return store_->Create(shape, {}, {"alice", {}})->id;
  }

  // Others may fork it.
  SequenceId Create(uint32_t layers = 1, bool pin = false, const char* client = "alice") {
    return store_->Create(Shape(layers), {pin, /*shared=*/true}, {client, {}})->id;
  }
  SequenceId Fork(SequenceId id, std::optional<uint64_t> length = {}) {
    return store_->Fork(id, length, {}, {"alice", {}})->id;
  }
  // A sequence with `text` in layer 0.
  SequenceId Load(const std::string& text, bool pin = false) {
    const SequenceId id = Create(1, pin);
    EXPECT_EQ(Append(id, text), absl::OkStatus());
    return id;
  }

  // The rows that one span appends to a sequence before it attends to it.
  struct Part {
    SequenceId id;
    std::string text;
    std::optional<uint64_t> expected_length = {};
  };

  OperationPtr MakeOperation(const std::vector<Part>& parts, uint32_t layer = 0,
                             const char* client = "alice") {
    auto operation = std::make_unique<AttendOperation>();
    operation->identity.name = client;
    operation->request = MakeRequest(1, 1, 1, 1, kHeadDim);
    operation->request.layer = layer;
    std::vector<SpanShape> spans;
    std::string text;
    for (const Part& part : parts) {
      spans.push_back(
          {1, static_cast<uint32_t>(part.text.size()), part.id.ToBytes(), part.expected_length});
      text += part.text;
    }
    SetSpans(std::move(spans), &operation->request);
    EXPECT_EQ(operation->tensors.Allocate(operation->request, &staging_), absl::OkStatus());
    for (size_t row = 0; row < text.size(); ++row) {
      std::memset(operation->tensors.key() + row * kRowBytes, text[row], kRowBytes);
      std::memset(operation->tensors.value() + row * kRowBytes, ~text[row], kRowBytes);
    }
    return operation;
  }
  OperationPtr Lease(const std::vector<Part>& parts, uint32_t layer = 0,
                     const char* client = "alice") {
    OperationPtr operation = MakeOperation(parts, layer, client);
    EXPECT_EQ(store_->Lease(operation.get()), absl::OkStatus());
    return operation;
  }

  // Begins a launch and writes its pages, as a device does.
  std::unique_ptr<Launch> Begin(
      const std::vector<AttendOperation*>& operations,
      LaunchFit fits = [](AttendOperation*) { return true; }) {
    auto launch = std::make_unique<Launch>();
    store_->BeginLaunch(operations, fits, launch.get());
    if (!launch->operations.empty()) WritePages(*launch);
    return launch;
  }

  // A whole request, from Lease to EndLaunch.
  absl::Status Append(const std::vector<Part>& parts, uint32_t layer = 0,
                      const char* client = "alice") {
    const OperationPtr operation = Lease(parts, layer, client);
    const std::unique_ptr<Launch> launch = Begin({operation.get()});
    store_->EndLaunch(*launch, true);
    return launch->refused.empty() ? absl::OkStatus() : launch->refused[0].second;
  }
  absl::Status Append(SequenceId id, const std::string& text, uint32_t layer = 0) {
    return Append({{id, text}}, layer);
  }

  // The K/V of span number `span` of those in `launch` that name a sequence.
  std::string Text(const Launch& launch, size_t span = 0) const {
    const ResidentKv& kv = launch.resident[span];
    std::string text;
    for (int32_t row = 0; row < kv.rows; ++row) {
      const size_t page = launch.pages[kv.first_page + row / kernels::kPageTokens];
      const std::byte* key =
          memory_.inputs.data() + page * Arena::kUnitBytes + row % kernels::kPageTokens * kRowBytes;
      const std::byte* value = key + kernels::kPageTokens * kRowBytes;
      for (size_t i = 0; i < kRowBytes; ++i) EXPECT_EQ(key[0], key[i]) << "row " << row;
      for (size_t i = 0; i < kRowBytes; ++i) EXPECT_EQ(key[0], ~value[i]) << "row " << row;
      text.push_back(static_cast<char>(key[0]));
    }
    return text;
  }
  std::string Text(SequenceId id, uint32_t layer = 0) {
    const OperationPtr operation = Lease({{id, ""}}, layer);
    const std::unique_ptr<Launch> launch = Begin({operation.get()});
    const std::string text = Text(*launch);
    store_->EndLaunch(*launch, true);
    return text;
  }

  // Begins moves and copies the pages at once, as a lane does.
  PageMoves BeginMoves(size_t max_bytes = ~size_t{0}) {
    PageMoves moves = store_->BeginMoves(max_bytes);
    CopyPages(moves);
    return moves;
  }
  void MovePages() { store_->EndMoves(BeginMoves(), true); }

  uint64_t Length(SequenceId id, uint32_t layer = 0) const {
    return store_->Get(id, {"alice", {}})->layer_lengths[layer];
  }
  size_t HotPages(SequenceId id) const {
    return store_->Get(id, {"alice", {}})->hot_bytes / kPageBytes;
  }
  size_t Pages() const { return store_->stats().pages; }
  bool Exists(SequenceId id) const { return store_->Get(id, {"alice", {}}).ok(); }

  StagingPool staging_{size_t{64} << 20, StagingPool::HeapAllocator()};
  FakeClock clock_;
  size_t given_back_ = 0;  // bytes
  MetricRegistry registry_;
  DeviceMetrics metrics_{"fake", &registry_};
  StagingClaim memory_;
  std::unique_ptr<SequenceStore> store_;
};

// A text of `rows` rows.
inline std::string Rows(size_t rows, char c) { return std::string(rows, c); }

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_KV_SEQUENCE_STORE_FIXTURE_H_
