// The launchers of the CUDA kernels, on the fake GPUs. CPU kernels compute. A kernel must find
// everything it reads and writes in device memory or in pinned memory, aligned to 16 bytes.
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/attention_cpu.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/read_bytes.h"
#include "kernels/cuda/work_list.h"
#include "kernels/kernel.h"
#include "kernels/kv_pages.h"
#include "kernels/sm80/attend.h"
#include "kernels/sm80/tiles.h"
#include "tests/device/fake_gpu_state.h"

namespace flashcore::kernels {
namespace {

namespace fake_gpu = server::testing::fake_gpu;
using fake_gpu::ExpectInReach;
using fake_gpu::ExpectOnDevice;

cudaError_t Enqueue(void* stream, std::function<void()> work) {
  if (const cudaError_t error = fake_gpu::launch_fault.Next(); error != cudaSuccess) return error;
  return fake_gpu::Push(stream, std::move(work));
}

void ExpectAligned(const void* at, const char* what) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 16, 0u) << what;
}

void ExpectSpanInReach(const Span& span) {
  ExpectAligned(span.query, "query");
  ExpectAligned(span.output, "output");
  ExpectInReach(span.query, "query");
  ExpectInReach(span.output, "output");
  if (span.lse != nullptr) ExpectInReach(span.lse, "lse");
  if (span.kv.rows == 0) return;
  ExpectAligned(span.kv.key, "key");
  ExpectAligned(span.kv.value, "value");
  ExpectInReach(span.kv.key, "key");
  ExpectInReach(span.kv.value, "value");
  if (span.kv.pages == nullptr) return;
  ExpectOnDevice(span.kv.key, "resident key");
}

// The counters of finished splits are in device memory, and 0.
void ExpectCounters(const int32_t* finished, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    ExpectOnDevice(finished + i, "counters");
    EXPECT_EQ(finished[i], 0);
  }
}

// The kernel reads a work list in memory, not the batch, so the list must be that of `batch`.
void ExpectWorkListOf(const AttentionBatch& batch, const Plan& plan, void* work_list) {
  const WorkListLayout layout(batch, plan);
  if (layout.BytesInMemory() == 0) return;
  ExpectInReach(work_list, "work list");
  std::vector<std::byte> should(layout.bytes + kWorkListAlignment);
  void* aligned = should.data();
  size_t room = should.size();
  std::align(kWorkListAlignment, layout.bytes, aligned, room);
  PackWorkList(batch, plan, layout, static_cast<std::byte*>(aligned));
  const auto* const want = static_cast<const WorkSpan*>(aligned);
  const auto* const has = static_cast<const WorkSpan*>(work_list);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    EXPECT_EQ(has[s].query, want[s].query);
    EXPECT_EQ(has[s].first_page, want[s].first_page);
    for (int32_t row = 0; row < batch.spans[s].kv.rows; row += kPageTokens) {
      EXPECT_EQ(has[s].PageOf(row), want[s].PageOf(row));
    }
  }
  const auto expect_tiles = [&](const WorkListLayout::TileArray& tiles) {
    for (int32_t i = 0; i < tiles.count + tiles.members; ++i) {
      const WorkTile &w = tiles.In(aligned)[i], &h = tiles.In(work_list)[i];
      EXPECT_EQ(h.span, w.span);
      EXPECT_EQ(h.row_count, w.row_count);
      EXPECT_EQ(h.kv_end, w.kv_end);
      EXPECT_EQ(h.first_partial_row, w.first_partial_row);
    }
  };
  for (const WorkListLayout::TileArray& kind : layout.kinds) expect_tiles(kind);
  expect_tiles(layout.combines);
  expect_tiles(layout.cascades);
}

// Sums in float32 whatever `accumulate` says.
int LaunchFake(Arch arch, Accumulate accumulate, const AttentionBatch& batch, const Plan& plan,
               const LaunchContext& ctx) {
  EXPECT_EQ(arch, Arch::kSmallShared);
  EXPECT_NE(ctx.cuda.branches, nullptr);
  ++fake_gpu::launches[static_cast<size_t>(accumulate)];
  for (const WorkItem& item : plan.items) fake_gpu::cascade_items += item.IsCascade();
  // The work list has a copy of each page table.
  const auto tables = std::make_shared<std::vector<std::vector<int32_t>>>();
  std::vector<Span> spans(batch.spans, batch.spans + batch.num_spans);
  for (Span& span : spans) {
    if (span.kv.pages == nullptr) continue;
    const int32_t* const pages = span.kv.pages;
    span.kv.pages = tables->emplace_back(pages, pages + PagesFor(span.kv.rows)).data();
  }
  return Enqueue(
      ctx.cuda.stream, [spans = std::move(spans), tables, geometry = batch.geometry, plan, ctx] {
        const AttentionBatch copy = {geometry, spans.data(), static_cast<int32_t>(spans.size())};
        for (const Span& span : spans) ExpectSpanInReach(span);
        ExpectWorkListOf(copy, plan, ctx.cuda.work_list);
        ExpectCounters(ctx.cuda.finished, plan.combines.size());
        thread_local ThreadPool threads(1);
        PlanOptions unsplit = sm80::PlanFor(geometry.head_dim);
        unsplit.item_per_kv_head = true;  // as CPU kernels need it
        unsplit.split_max_rows = 0;       // no workspace
        Plan cpu_plan;
        MakePlan(copy, unsplit, 1, &cpu_plan);
        LaunchAttentionCpu(copy, cpu_plan, {nullptr, &threads});
      });
}

}  // namespace

namespace sm80 {

template <Arch kArch, DType kDType, int kHeadDim, Accumulate kAccumulate, KvDType kKvDType,
          Precision kPrecision>
int Attend(const AttentionBatch& batch, const Plan& plan, const LaunchContext& ctx) {
  EXPECT_EQ(batch.geometry.dtype, kDType);
  EXPECT_EQ(batch.geometry.head_dim, kHeadDim);
  EXPECT_EQ(batch.geometry.kv_dtype, kKvDType);
  EXPECT_EQ(batch.geometry.precision, kPrecision);
  return LaunchFake(kArch, kAccumulate, batch, plan, ctx);
}

// The rows of the registry. The linker names one that is missing.
template <Arch kArch, int... kHeadDims>
struct Rows {
  static constexpr Launcher* kAll[] = {
      Attend<kArch, DType::kFloat16, kHeadDims>..., Attend<kArch, DType::kBFloat16, kHeadDims>...,
      Attend<kArch, DType::kFloat16, kHeadDims, Accumulate::kFloat16>...};
};
template <Arch kArch, KvDType kKvDType, Precision kPrecision, int... kHeadDims>
struct Rows8Bit {
  static constexpr Launcher* kAll[] = {
      Attend<kArch, DType::kFloat16, kHeadDims, Accumulate::kFloat32, kKvDType, kPrecision>...,
      Attend<kArch, DType::kBFloat16, kHeadDims, Accumulate::kFloat32, kKvDType, kPrecision>...};
};
template struct Rows<Arch::kLargeShared, 32, 64, 96, 128, 256>;
template struct Rows<Arch::kSmallShared, 32, 64, 96, 128, 256>;
template struct Rows8Bit<Arch::kLargeShared, KvDType::kFloat8E4M3, Precision::k16Bit, 64, 128>;
template struct Rows8Bit<Arch::kSmallShared, KvDType::kFloat8E4M3, Precision::k16Bit, 64, 128>;
template struct Rows8Bit<Arch::kLargeShared, KvDType::kInt8, Precision::k16Bit, 64, 128>;
template struct Rows8Bit<Arch::kSmallShared, KvDType::kInt8, Precision::k16Bit, 64, 128>;
template struct Rows8Bit<Arch::kLargeShared, KvDType::kInt8, Precision::kInt8Qk, 64, 128>;
template struct Rows8Bit<Arch::kSmallShared, KvDType::kInt8, Precision::kInt8Qk, 64, 128>;
template struct Rows8Bit<Arch::kLargeShared, KvDType::kInt8, Precision::kInt8QkPv, 64, 128>;
template struct Rows8Bit<Arch::kSmallShared, KvDType::kInt8, Precision::kInt8QkPv, 64, 128>;

}  // namespace sm80

int AppendRowsCuda(const PageLayout& layout, const RowAppend* list, int32_t count, void* stream) {
  std::vector<RowAppend> in_parameters;
  if (count <= kAppendsInParameters) in_parameters.assign(list, list + count);
  return Enqueue(stream, [=] {
    if (in_parameters.empty()) ExpectInReach(list, "appends");
    const RowAppend* const appends = in_parameters.empty() ? list : in_parameters.data();
    for (int32_t i = 0; i < count; ++i) {
      ExpectAligned(appends[i].key, "key to append");
      ExpectAligned(appends[i].value, "value to append");
      ExpectInReach(appends[i].key, "key to append");
      ExpectInReach(appends[i].value, "value to append");
      ExpectOnDevice(appends[i].page, "page");
    }
    AppendRowsCpu(layout, appends, count, nullptr);
  });
}

int CopyPagesCuda(int64_t page_bytes, const PageCopy* copies, int32_t count, void* stream) {
  return Enqueue(stream, [=] {
    ExpectInReach(copies, "copies");
    CopyPagesCpu(page_bytes, copies, count, nullptr);
  });
}

cudaError_t ReadBytes(const void* from, size_t bytes, uint32_t* sink, cudaStream_t stream) {
  fake_gpu::Stream* const on = fake_gpu::ToStream(stream);
  on->reads_window = fake_gpu::WindowCovers(*on, from, bytes);
  return Enqueue(stream, [=] {
    ExpectOnDevice(from, bytes, "the bytes to read");
    ExpectOnDevice(sink, "sink");
  });
}

}  // namespace flashcore::kernels
