// The CUDA device's calls of the driver, on a fake GPU. real_device_test.cc and
// sequences_property_test.cc, linked with the same fake, check its results.
#include "tests/device/fake_gpu.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/device/cuda_device.h"
#include "server/device/open_device.h"
#include "server/memory/shared_memory.h"
#include "server/request/spans.h"
#include "tests/device/fake_gpu_fixture.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using kernels::Accumulate;
using testing::AttendJob;
using testing::FakeGpuTest;
using ::testing::HasSubstr;
using testing::SmallOptions;

// The time of `pieces` copies or kernels.
Nanoseconds TimeOf(int pieces) {
  return std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<float, std::milli>(pieces * testing::kFakeGpuPieceMs));
}

// Places every tensor in `region`, 32 KiB from each other, the first at `offset`.
void Place(const std::shared_ptr<const SharedRegion>& region, uint64_t offset,
           AttendRequest* request) {
  const size_t bytes[] = {request->query_bytes, request->key_bytes, request->value_bytes,
                          request->output_bytes(), request->lse_bytes()};
  for (int i = 0; i < kNumTensors; ++i) {
    request->ranges[i] = {region, offset + 32768u * i, bytes[i]};
  }
}

TEST_F(FakeGpuTest, TimesAreThoseBetweenTheEvents) {
  Start(SmallOptions());
  const testing::Memfd file(size_t{256} << 10);
  AttendJob job;
  job.operation.request = testing::MakeRequest(5, 100);
  job.operation.request.return_lse = true;
  const std::shared_ptr<const SharedRegion> region = file.Map();  // not pinned: is copied
  Place(region, 0, &job.operation.request);
  ASSERT_EQ(Attend(&job), absl::OkStatus());
  EXPECT_EQ(times_.copy_in, TimeOf(3)) << "Q, K and V";
  EXPECT_EQ(times_.kernel, TimeOf(1));
  EXPECT_EQ(times_.copy_out, TimeOf(2)) << "O and LSE";
}

TEST_F(FakeGpuTest, TimesAreSumsOverThePasses) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  options.direct_io_bytes = 0;
  Start(options);
  AttendJob job;
  job.operation.request = testing::MakeRequest();
  testing::SetSpans(std::vector<SpanShape>(400, {1, 2, "", {}}), &job.operation.request);
  const int launches = testing::FakeGpuLaunches(kernels::Accumulate::kFloat32);
  ASSERT_EQ(Attend(&job), absl::OkStatus());
  const int passes = testing::FakeGpuLaunches(kernels::Accumulate::kFloat32) - launches;
  EXPECT_GE(passes, 4) << "parameters list few spans, and 2 KiB fewer";
  EXPECT_EQ(times_.copy_in, TimeOf(1)) << "the inputs, in the first";
  EXPECT_EQ(times_.kernel, TimeOf(passes));
  EXPECT_EQ(times_.copy_out, TimeOf(1)) << "the results in the last";
}

TEST_F(FakeGpuTest, SumsInFloat16IfAskedTo) {
  CudaDevice::Options options = SmallOptions();
  for (const Accumulate accumulate : {Accumulate::kFloat16, Accumulate::kFloat32}) {
    const bool in_float16 = accumulate == Accumulate::kFloat16;
    options.accumulate = accumulate;
    Start(options);
    for (const kernels::Kernel* kernel : engine_->device().kernels()) {
      EXPECT_EQ(kernel->spec.accumulate, accumulate);
    }
    const int in16 = testing::FakeGpuLaunches(Accumulate::kFloat16);
    const int in32 = testing::FakeGpuLaunches(Accumulate::kFloat32);
    for (const uint32_t head_dim : {32u, 64u, 96u, 128u, 256u}) {
      AttendJob job;
      job.operation.request = testing::MakeRequest(3, 100, 2, 1, head_dim);
      ASSERT_EQ(Attend(&job), absl::OkStatus());
      EXPECT_EQ(
          FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
          "");
    }
    EXPECT_EQ(testing::FakeGpuLaunches(Accumulate::kFloat16) - in16, in_float16 ? 5 : 0);
    EXPECT_EQ(testing::FakeGpuLaunches(Accumulate::kFloat32) - in32, in_float16 ? 0 : 5);
    AttendJob bfloat16;
    bfloat16.operation.request = testing::MakeRequest();
    bfloat16.operation.request.dtype = kernels::DType::kBFloat16;
    EXPECT_EQ(Attend(&bfloat16).code(),
              in_float16 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kOk);
  }
}

TEST_F(FakeGpuTest, CopiesMorePagesThanOneListHolds) {
  CudaDevice::Options options = SmallOptions();
  options.list_bytes = 2048;
  const auto device = CudaDevice::Create(options).value();
  constexpr int kPages = 300;  // a list holds 128
  constexpr size_t kPageBytes = 1024;
  std::byte* const base = device->kv_memory().base;
  std::vector<kernels::PageCopy> copies;
  for (int i = 0; i < kPages; ++i) {
    std::byte* const from = base + i * kPageBytes;
    std::memset(from, i % 251, kPageBytes);
    copies.push_back({from, from + kPages * kPageBytes});
  }
  ASSERT_EQ(device->CopyPages(0, kPageBytes, copies), absl::OkStatus());
  EXPECT_EQ(std::memcmp(base, base + kPages * kPageBytes, kPages * kPageBytes), 0);
}

// Counts the copies of inputs, results and lists.
TEST_F(FakeGpuTest, CopiesNothingThatIsSmallAndReadOnce) {
  CudaDevice::Options options = SmallOptions();
  const auto copies_of = [&](uint32_t query_rows, uint32_t kv_rows) {
    const int copies = testing::FakeGpuCopies();
    EXPECT_EQ(Attend(query_rows, kv_rows), absl::OkStatus());
    return testing::FakeGpuCopies() - copies;
  };
  options.direct_io_bytes = 0;
  Start(options);
  EXPECT_EQ(copies_of(1, 1), 2);
  options.direct_io_bytes = 256 * 1024;
  Start(options);
  EXPECT_EQ(copies_of(1, 900), 0);
  EXPECT_EQ(copies_of(16, 900), 0);
  EXPECT_EQ(copies_of(17, 900), 2) << "17 rows of 2 heads may be two tiles, which both read K/V";
  EXPECT_EQ(copies_of(1, 1100), 2) << "more than 256 KiB";
}

TEST_F(FakeGpuTest, SendsTheListsOfAnAppendAndOfTheAttentionInOneCopyOrInParameters) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = size_t{4} << 20;
  Start(options);
  const auto sequence =
      engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, {false}, {"alice", {}});
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  const int pages = kernels::kAppendsInParameters;
  const auto copies_of = [&](int rows) {
    const int copies = testing::FakeGpuCopies();
    EXPECT_EQ(Append(sequence->id, 0, rows), absl::OkStatus());
    return testing::FakeGpuCopies() - copies;
  };
  EXPECT_EQ(copies_of(pages * kernels::kPageTokens), 0);
  EXPECT_EQ(copies_of(1), 0);
  EXPECT_EQ(copies_of((pages + 1) * kernels::kPageTokens - 1), 1) << "one append too many";
}

// Kernels can reach pinned memory. Tensors in other memory are copied, however small.
TEST_F(FakeGpuTest, ReadsAndWritesSharedMemory) {
  CudaDevice::Options options = SmallOptions();
  for (const auto& [direct_io_bytes, is_pinned, copies] :
       {std::tuple(0, true, 5), std::tuple(1 << 20, true, 0), std::tuple(1 << 20, false, 5)}) {
    options.direct_io_bytes = static_cast<size_t>(direct_io_bytes);
    Start(options);
    Gauge bytes, regions;
    SharedMemory memory({}, &engine_->device(), &bytes, &regions);
    const testing::Memfd file(size_t{256} << 10);
    std::shared_ptr<const SharedRegion> region =
        memory.Map(FileDescriptor(dup(file.fd())), file.bytes(), /*read_only=*/false, "a").value();
    EXPECT_TRUE(region->in_reach());
    if (!is_pinned) region = file.Map();

    AttendJob job;
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(5, 100);
    request.return_lse = true;
    Place(region, 16, &request);
    testing::FillTensors(&job, &random_);
    const int before = testing::FakeGpuCopies();
    ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
    EXPECT_EQ(engine_->staging().used_bytes(), 0u);
    ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    EXPECT_EQ(testing::FakeGpuCopies() - before, copies);
    EXPECT_EQ(
        FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
        "");
  }
}

// Two requests of one launch append the same rows, each to a sequence of its own.
TEST_F(FakeGpuTest, AppendsTheSameSharedRowsTwice) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Start(options);
  const testing::Memfd file(size_t{256} << 10);
  const std::shared_ptr<const SharedRegion> region = file.Map();
  AttendJob jobs[2];
  for (AttendJob& job : jobs) {
    const auto sequence =
        engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, {false}, {"alice", {}});
    AttendRequest& request = job.operation.request;
    request = testing::MakeRequest(1, 100);
    request.spans[0].sequence_id = sequence->id.ToBytes();
    request.ranges[kKey] = {region, 0, request.key_bytes};
    request.ranges[kValue] = {region, 32768, request.value_bytes};
    testing::FillTensors(&job, &random_);
    if (&job == &jobs[1]) {
      job.key = jobs[0].key;
      job.value = jobs[0].value;
    }
    ASSERT_EQ(Prepare(&job, engine_.get()), absl::OkStatus());
  }
  for (AttendJob& job : jobs) ASSERT_EQ(engine_->Enqueue(&job.operation), absl::OkStatus());
  for (AttendJob& job : jobs) {
    ASSERT_EQ(job.ended.get(), absl::OkStatus());
    job.operation.request.spans[0].sequence_id = {};  // the reference takes inline K/V
    EXPECT_EQ(
        FirstDifference(job, Reference(job), testing::KernelTolerance(kernels::DType::kFloat16)),
        "");
  }
}

// Only the second span reads inline K/V.
TEST_F(FakeGpuTest, APartHasTheInputsOfAllItsSpans) {
  CudaDevice::Options options = SmallOptions();
  options.direct_io_bytes = 0;
  Engine::Options in_parts;
  in_parts.batcher.max_launch = Nanoseconds(1);
  Start(options, in_parts);
  const auto sequence =
      engine_->sequences().Create({1, 1, 64, kernels::DType::kFloat16}, {false}, {"alice", {}});
  ASSERT_EQ(sequence.status(), absl::OkStatus());
  AttendJob rows, job;
  rows.operation.request = testing::MakeRequest(1, 60);
  rows.operation.request.spans[0].sequence_id = sequence->id.ToBytes();
  ASSERT_EQ(Attend(&rows), absl::OkStatus());
  AttendRequest& request = job.operation.request;
  request = testing::MakeRequest();
  testing::SetSpans({{192, 0, sequence->id.ToBytes(), {}}, {320, 50, "", {}}}, &request);
  const int launches = testing::FakeGpuLaunches(Accumulate::kFloat32);
  ASSERT_EQ(Attend(&job), absl::OkStatus());
  EXPECT_GE(testing::FakeGpuLaunches(Accumulate::kFloat32) - launches, 2) << "parts";
  const AttendRequest& append = rows.operation.request;
  const SpanCursor cursor(append, rows.addresses());
  const kernels::KvView resident = InlineSpan(append, append.spans[0], cursor.tensors()).kv;
  EXPECT_EQ(FirstDifference(job, Reference(job, {resident, {}}),
                            testing::KernelTolerance(kernels::DType::kFloat16)),
            "");
}

// Decodes of four forks of one sequence, in one request.
TEST_F(FakeGpuTest, ForksShareTheirPrefixUnlessToldNotTo) {
  for (const bool share : {true, false}) {
    CudaDevice::Options options = SmallOptions();
    options.share_prefixes = share;
    Start(options);
    SequenceStore& sequences = engine_->sequences();
    const Identity alice{"alice", {}};
    const auto parent = sequences.Create({1, 2, 64, kernels::DType::kFloat16}, {false}, alice);
    std::vector<SequenceId> ids = {parent->id};
    AttendJob prefix;
    prefix.operation.request = testing::MakeRequest(1, 4160, 2, 2);
    prefix.operation.request.spans[0].sequence_id = parent->id.ToBytes();
    ASSERT_EQ(Attend(&prefix), absl::OkStatus());
    for (int i = 0; i < 3; ++i) ids.push_back(sequences.Fork(parent->id, {}, {false}, alice)->id);

    AttendJob decodes;
    decodes.operation.request = testing::MakeRequest(1, 1, 2, 2);
    std::vector<SpanShape> spans;
    for (const SequenceId& id : ids) spans.push_back({1, 1, id.ToBytes(), {}});
    testing::SetSpans(spans, &decodes.operation.request);
    const int items = testing::FakeGpuCascadeItems();
    ASSERT_EQ(Attend(&decodes), absl::OkStatus());
    EXPECT_EQ(testing::FakeGpuCascadeItems() > items, share);
  }
}

TEST_F(FakeGpuTest, WhatNoLaneHasRoomForIsRefusedWithItsSize) {
  CudaDevice::Options options = SmallOptions();
  options.workspace_bytes = 1024;
  Start(options);
  EXPECT_EQ(Attend(1, 100), absl::OkStatus());  // does not split
  absl::Status status = Attend(1, 5000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("a lane has 1024"));
  status = Attend(1, 9000);  // K and V of 2.2 MiB
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("bytes of device memory"));
  EXPECT_EQ(Attend(1, 100), absl::OkStatus());
}

TEST_F(FakeGpuTest, AutoTakesTheGpu) {
  DeviceOptions options;
  options.cuda = {SmallOptions()};
  const auto opened = OpenDevices(options, &clock_);
  ASSERT_EQ(opened.status(), absl::OkStatus());
  ASSERT_EQ(opened->devices.size(), 1u);
  EXPECT_EQ(opened->devices[0]->info().id, "cuda:0");
}

TEST_F(FakeGpuTest, TooLittleMemoryStopsTheStartAndIsNotReplacedByTheCpu) {
  DeviceOptions options;
  options.cuda = {SmallOptions()};
  options.cuda[0].kv_memory_bytes = size_t{9} << 30;
  const absl::Status status = OpenDevices(options, &clock_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("9663676416 bytes for resident K/V"));
  EXPECT_THAT(status.message(), HasSubstr("of 8589934592 bytes are free"));
}

TEST_F(FakeGpuTest, StagingMemoryThatIsUsedUpIsRefusedAndComesBack) {
  CudaDevice::Options options = SmallOptions();
  options.staging_memory_bytes = 64 << 10;
  Start(options);
  EXPECT_EQ(Attend(1, 300).code(), absl::StatusCode::kResourceExhausted);  // K and V of 75 KiB
  for (int i = 0; i < 10; ++i) {  // sizes that do not fit side by side
    EXPECT_EQ(Attend(1, 200), absl::OkStatus());
    EXPECT_EQ(Attend(1, 1), absl::OkStatus());
    EXPECT_EQ(Attend(1, 100), absl::OkStatus());
  }
}

}  // namespace
}  // namespace flashcore::server
