// Appending K/V rows to pages, copying pages, and attention over such pages.
#include "kernels/kv_pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/oracle/reference.h"
#include "kernels/plan.h"
#include "kernels/registry.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/launch.h"
#include "tests/kernels/problem.h"
#ifdef FLASHCORE_HAVE_CUDA
#include "tests/kernels/device_mirror.h"
#endif

namespace flashcore::kernels {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::byte kPoison{0xa5};
constexpr size_t kGuard = 256;  // poisoned bytes before and after what a call may write

Bytes RandomBytes(size_t size, std::mt19937* random) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((*random)());
  return bytes;
}

// Bytes of one head's row of the source. Its elements have 16 bits, also for 8-bit pages.
int64_t SourceRowBytes(const PageLayout& layout) {
  return layout.head_dim * static_cast<int64_t>(DTypeBytes(layout.dtype));
}

// Source rows of K or V: [rows][kv_heads][head_dim] or [kv_heads][rows][head_dim], of random bits,
// infinities and NaN included; rows with even numbers are finite.
struct Source {
  Source(const PageLayout& layout, int32_t rows, bool heads_first, std::mt19937* random)
      : row_stride(SourceRowBytes(layout) * (heads_first ? 1 : layout.num_kv_heads)),
        head_stride(SourceRowBytes(layout) * (heads_first ? rows : 1)),
        bytes(RandomBytes(SourceRowBytes(layout) * layout.num_kv_heads * rows, random)) {
    for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
      for (int32_t row = 0; row < rows; row += 2) {
        std::byte* const at = bytes.data() + row * row_stride + head * head_stride;
        for (int64_t i = 1; i < SourceRowBytes(layout); i += 2) at[i] &= std::byte{0xbf};
      }
    }
  }

  const std::byte* Row(int32_t row, int32_t head) const {
    return bytes.data() + row * row_stride + head * head_stride;
  }

  int64_t row_stride;
  int64_t head_stride;
  Bytes bytes;
};

RowAppend Append(const Source& key, const Source& value, int32_t first, std::byte* page,
                 int32_t row, int32_t rows) {
  return {key.Row(first, 0), value.Row(first, 0), key.row_stride, key.head_stride, page, row, rows};
}

uint16_t Element(const std::byte* row, int32_t d) {
  uint16_t element;
  std::memcpy(&element, row + d * sizeof(element), sizeof(element));
  return element;
}

// The E4M3 code nearest to a number up to 448, from the definition; of two, the even one.
std::byte NearestE4M3(float number) {
  std::vector<double> magnitudes;  // of the codes that are not NaN and have no sign
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    magnitudes.push_back(exponent == 0 ? std::ldexp(mantissa, -9)
                                       : std::ldexp(8 + mantissa, exponent - 10));
  }
  const double magnitude = std::abs(number);
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end() - 1, magnitude);
  auto code = static_cast<int>(above - magnitudes.begin());
  if (code > 0) {
    const double down = magnitude - magnitudes[code - 1], up = magnitudes[code] - magnitude;
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<std::byte>(code | (std::signbit(number) ? 0x80 : 0));
}

float LargestFinite(DType dtype) { return dtype == DType::kFloat16 ? 65504 : 0x1.fep127f; }

// Expected result of appending one head's row to an 8-bit page, from the definition.
void QuantiseRowSlowly(const PageLayout& layout, const std::byte* from, std::byte* to,
                       std::byte* scale_to) {
  const bool is_int8 = layout.kv_dtype == KvDType::kInt8;
  float largest = 0;
  bool is_finite = true;
  for (int32_t d = 0; d < layout.head_dim; ++d) {
    const float element = ToFloat(layout.dtype, Element(from, d));
    is_finite = is_finite && std::isfinite(element);
    largest = std::max(largest, std::abs(element));
  }
  const float largest_code = is_int8 ? 127 : 448;
  const float wanted = largest / largest_code;
  // The smallest BFloat16 that is not below.
  uint16_t bits = FloatToBFloat16(wanted);
  while (bits > 0 && BFloat16ToFloat(bits - 1) >= wanted) --bits;
  while (BFloat16ToFloat(bits) < wanted) ++bits;
  // Down where the largest code would be read as more than the type has.
  while (BFloat16ToFloat(bits) * largest_code > LargestFinite(layout.dtype)) --bits;
  if (!is_finite) bits = FloatToBFloat16(NAN);
  std::memcpy(scale_to, &bits, sizeof(bits));
  for (int32_t d = 0; d < layout.head_dim; ++d) {
    const float number = ToFloat(layout.dtype, Element(from, d)) / BFloat16ToFloat(bits);
    if (!std::isfinite(number)) {
      to[d] = std::byte{0};
    } else {
      const float kept = std::clamp(number, -largest_code, largest_code);
      to[d] = is_int8 ? static_cast<std::byte>(std::lrint(kept)) : NearestE4M3(kept);
    }
  }
}

// Expected result of appending rows to a page, from the definition of the layout.
void AppendSlowly(const PageLayout& layout, const Source& key, const Source& value, int32_t first,
                  std::byte* page, int32_t row, int32_t rows) {
  for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
    for (int32_t i = 0; i < rows; ++i) {
      for (const Source* source : {&key, &value}) {
        std::byte* const base = page + (source == &key ? 0 : layout.page_bytes() / 2);
        const std::byte* const from = source->Row(first + i, head);
        std::byte* const to = base + head * layout.head_bytes() + (row + i) * layout.row_bytes();
        if (layout.kv_dtype == KvDType::kSameAsQuery) {
          std::copy_n(from, layout.row_bytes(), to);
        } else {
          QuantiseRowSlowly(layout, from, to, base + layout.scales_offset(head) + (row + i) * 2);
        }
      }
    }
  }
}

// The page functions of one device. All pointers are to host memory.
struct PageWriter {
  const char* name;
  void (*append)(const PageLayout& layout, const RowAppend* appends, int32_t count,
                 ThreadPool* threads);
  void (*copy)(int64_t page_bytes, const PageCopy* copies, int32_t count, ThreadPool* threads);
};

void PrintTo(const PageWriter& writer, std::ostream* out) { *out << writer.name; }

#ifdef FLASHCORE_HAVE_CUDA
using Access = DeviceMirror::Access;

void AppendOnDevice(const PageLayout& layout, const RowAppend* appends, int32_t count,
                    ThreadPool* /*threads*/) {
  std::vector<RowAppend> on_device(appends, appends + count);
  DeviceMirror mirror;
  for (const RowAppend& append : on_device) {
    const size_t bytes = (append.rows - 1) * append.row_stride +
                         (layout.num_kv_heads - 1) * append.head_stride + SourceRowBytes(layout);
    mirror.Add(append.key, bytes, Access::kRead);
    mirror.Add(append.value, bytes, Access::kRead);
    mirror.Add(append.page, layout.page_bytes(), Access::kWrite);
  }
  mirror.Add(on_device.data(), count * sizeof(RowAppend), Access::kRead);
  mirror.Allocate();
  for (RowAppend& append : on_device) {
    append.key = mirror.At(append.key);
    append.value = mirror.At(append.value);
    append.page = mirror.At(append.page);
  }
  mirror.Upload();
  const RowAppend* const list =
      count <= kAppendsInParameters ? on_device.data() : mirror.At(on_device.data());
  EXPECT_EQ(AppendRowsCuda(layout, list, count, nullptr), 0);
  mirror.Download();
}

void CopyOnDevice(int64_t page_bytes, const PageCopy* copies, int32_t count,
                  ThreadPool* /*threads*/) {
  std::vector<PageCopy> on_device(copies, copies + count);
  DeviceMirror mirror;
  for (const PageCopy& copy : on_device) {
    mirror.Add(copy.from, page_bytes, Access::kRead);
    mirror.Add(copy.to, page_bytes, Access::kWrite);
  }
  mirror.Add(on_device.data(), count * sizeof(PageCopy), Access::kRead);
  mirror.Allocate();
  for (PageCopy& copy : on_device) copy = {mirror.At(copy.from), mirror.At(copy.to)};
  mirror.Upload();
  EXPECT_EQ(CopyPagesCuda(page_bytes, mirror.At(on_device.data()), count, nullptr), 0);
  mirror.Download();
}
#endif

std::vector<PageWriter> PageWriters() {
  return {
      {"cpu", AppendRowsCpu, CopyPagesCpu},
#ifdef FLASHCORE_HAVE_CUDA
      {"cuda", AppendOnDevice, CopyOnDevice},
#endif
  };
}

class PageWriterTest : public testing::TestWithParam<PageWriter> {
 protected:
  void SetUp() override {
#ifdef FLASHCORE_HAVE_CUDA
    if (GetParam().append == AppendRowsCpu) return;
    const std::string why = WhyNoDevice();
    if (!why.empty()) GTEST_SKIP() << why;
#endif
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, PageWriterTest, testing::ValuesIn(PageWriters()),
                         testing::PrintToStringParamName());

TEST(PageLayout, HoldsKeysThenValues) {
  const PageLayout layout{DType::kBFloat16, 8, 128};
  EXPECT_EQ(layout.row_bytes(), 256);
  EXPECT_EQ(layout.head_bytes(), 64 * 256);
  EXPECT_EQ(layout.value_offset(), 8 * 64 * 256);
  EXPECT_EQ(layout.page_bytes(), 2 * 8 * 64 * 256);
  for (const KvDType kv_dtype : {KvDType::kFloat8E4M3, KvDType::kInt8}) {
    const PageLayout in_8_bits{DType::kBFloat16, 8, 128, kv_dtype};
    EXPECT_EQ(in_8_bits.row_bytes(), 128);
    EXPECT_EQ(in_8_bits.head_bytes(), 64 * (128 + 2));
    EXPECT_EQ(in_8_bits.scales_offset(3), 3 * 64 * (128 + 2) + 64 * 128);
    EXPECT_EQ(in_8_bits.page_bytes(), 2 * 8 * 64 * (128 + 2));
  }
}

void CheckAppend(const PageWriter& writer, const PageLayout& layout, bool heads_first,
                 std::mt19937* random) {
  const int32_t places[][2] = {{0, 64}, {0, 1}, {63, 1}, {17, 30}, {1, 63}};  // row, rows
  for (const auto& [row, rows] : places) {
    SCOPED_TRACE(testing::Message() << layout.num_kv_heads << " heads x " << layout.head_dim << " "
                                    << Name(layout.kv_dtype) << ", rows " << row << " + " << rows
                                    << (heads_first ? ", HND" : ", NHD"));
    constexpr int32_t kSkipped = 2;  // leading source rows that are not appended
    const Source key(layout, kSkipped + rows, heads_first, random);
    const Source value(layout, kSkipped + rows, heads_first, random);
    Bytes got(layout.page_bytes() + 2 * kGuard, kPoison);
    Bytes want = got;
    const RowAppend append = Append(key, value, kSkipped, got.data() + kGuard, row, rows);
    writer.append(layout, &append, 1, nullptr);
    AppendSlowly(layout, key, value, kSkipped, want.data() + kGuard, row, rows);
    EXPECT_TRUE(got == want);
  }
}

TEST_P(PageWriterTest, AppendWritesTheRowsAndNothingElse) {
  std::mt19937 random(TestSeed());
  for (int32_t kv_heads : {1, 3, 8}) {
    for (int32_t head_dim : {32, 96, 256}) {
      for (bool heads_first : {false, true}) {
        for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
          for (KvDType kv_dtype : {KvDType::kSameAsQuery, KvDType::kFloat8E4M3, KvDType::kInt8}) {
            CheckAppend(GetParam(), {dtype, kv_heads, head_dim, kv_dtype}, heads_first, &random);
          }
        }
      }
    }
  }
}

// Enough bytes for the pool, and an append that begins and ends inside a page.
TEST_P(PageWriterTest, AppendsSameBytesWithAndWithoutThreads) {
  constexpr int32_t kFirstRow = 40, kRows = 4000, kPages = 64;
  static_assert(kPages - 1 > kAppendsInParameters);
  std::mt19937 random(TestSeed());
  ThreadPool pool(3);
  for (const auto& [heads_first, kv_dtype] : {std::pair{false, KvDType::kSameAsQuery},
                                              {true, KvDType::kSameAsQuery},
                                              {true, KvDType::kFloat8E4M3},
                                              {true, KvDType::kInt8}}) {
    const PageLayout layout{DType::kFloat16, 4, 128, kv_dtype};
    const Source key(layout, kRows, heads_first, &random);
    const Source value(layout, kRows, heads_first, &random);
    std::vector<Bytes> arenas;
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
      Bytes& arena = arenas.emplace_back(kPages * layout.page_bytes(), kPoison);
      std::vector<RowAppend> appends;
      for (int32_t done = 0, at = kFirstRow; done < kRows;) {
        const int32_t rows = std::min(kRows - done, kPageTokens - at % kPageTokens);
        appends.push_back(Append(key, value, done,
                                 arena.data() + at / kPageTokens * layout.page_bytes(),
                                 at % kPageTokens, rows));
        done += rows;
        at += rows;
      }
      GetParam().append(layout, appends.data(), static_cast<int32_t>(appends.size()), threads);
    }
    EXPECT_TRUE(arenas[0] == arenas[1]);
    Bytes first_page(layout.page_bytes(), kPoison);
    AppendSlowly(layout, key, value, 0, first_page.data(), kFirstRow, kPageTokens - kFirstRow);
    EXPECT_TRUE(std::equal(first_page.begin(), first_page.end(), arenas[0].begin()));
  }
}

TEST_P(PageWriterTest, OfNothingIsNothing) {
  GetParam().append({DType::kFloat16, 1, 64}, nullptr, 0, nullptr);
  GetParam().copy(1, nullptr, 0, nullptr);
}

TEST_P(PageWriterTest, CopiesWholePagesAndNothingElse) {
  std::mt19937 random(TestSeed());
  ThreadPool pool(3);
  for (int64_t page_bytes : {8192, 65536}) {
    for (int32_t count : {1, 2, 40}) {
      const Bytes from = RandomBytes(count * page_bytes, &random);
      for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
        Bytes to(2 * count * page_bytes, kPoison);  // every other page is unused
        std::vector<PageCopy> copies;
        for (int32_t i = 0; i < count; ++i) {
          copies.push_back(
              {from.data() + i * page_bytes, to.data() + (2 * (count - 1 - i) + 1) * page_bytes});
        }
        GetParam().copy(page_bytes, copies.data(), count, threads);
        for (int32_t i = 0; i < count; ++i) {
          EXPECT_TRUE(std::equal(copies[i].from, copies[i].from + page_bytes, copies[i].to));
          const std::byte* unused = copies[i].to - page_bytes;
          EXPECT_TRUE(std::all_of(unused, unused + page_bytes,
                                  [](std::byte byte) { return byte == kPoison; }));
        }
      }
    }
  }
}

// Attends one span with the CPU kernel.
void Attend(const Geometry& geometry, const Span& span, ThreadPool* threads) {
  const Kernel* kernel = FindKernel({Arch::kCpu, geometry.dtype, geometry.head_dim});
  ASSERT_NE(kernel, nullptr);
  const AttentionBatch batch{geometry, &span, 1};
  Plan plan;
  MakePlan(batch, kernel->plan_options, threads->num_threads(), &plan);
  ASSERT_EQ(Launch(*kernel, batch, plan, threads), 0);
}

// Rows appended to pages in random order. The page table counts in units smaller than a page.
struct WrittenPages {
  WrittenPages(const PageLayout& layout, const KvView& dense, ThreadPool* threads,
               std::mt19937_64* random) {
    constexpr int64_t kUnit = 256;
    const int32_t tiles = PagesFor(dense.rows);
    pages.resize(2 * tiles);
    for (int32_t i = 0; i < 2 * tiles; ++i) pages[i] = i * (layout.page_bytes() / kUnit);
    std::shuffle(pages.begin(), pages.end(), *random);
    arena.assign(2 * tiles * layout.page_bytes(), std::byte{0xff});  // NaN in every type but INT8
    std::vector<RowAppend> appends;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const int64_t from = (dense.pages != nullptr ? dense.pages[tile] : tile) * dense.page_stride;
      appends.push_back({dense.key + from, dense.value + from, dense.row_stride, dense.head_stride,
                         arena.data() + pages[tile] * kUnit, 0,
                         std::min(kPageTokens, dense.rows - tile * kPageTokens)});
    }
    AppendRowsCpu(layout, appends.data(), tiles, threads);
    view = {arena.data(),        arena.data() + layout.value_offset(),
            pages.data(),        kUnit,
            layout.head_bytes(), layout.row_bytes(),
            dense.rows};
  }
  WrittenPages(const WrittenPages&) = delete;
  WrittenPages& operator=(const WrittenPages&) = delete;

  Bytes arena;
  std::vector<int32_t> pages;
  KvView view;
};

TEST(KvPages, AttentionOverWrittenPagesIsThatOverDenseRows) {
  std::mt19937_64 random(TestSeed());
  ThreadPool pool(2);
  for (const Layout source : {Layout::kDenseNhd, Layout::kDenseHnd}) {
    for (int32_t kv_rows : {1, 64, 700}) {
      const Geometry geometry{DType::kFloat16, 4, 2, 64};
      const PageLayout layout{geometry.dtype, geometry.num_kv_heads, geometry.head_dim};
      Problem problem(geometry, {{2, kv_rows, Mask::Causal(), source}}, &random);
      const Span& span = problem.span(0).span();
      Attend(geometry, span, &pool);
      const std::vector<uint16_t> want = problem.span(0).Output();
      const std::vector<float> want_lse = problem.span(0).Lse();

      const WrittenPages written(layout, span.kv, &pool, &random);
      problem.span(0).mutable_span().kv = written.view;
      problem.span(0).PoisonOutputs();
      Attend(geometry, span, &pool);
      EXPECT_EQ(problem.span(0).Output(), want);
      EXPECT_EQ(problem.span(0).Lse(), want_lse);
    }
  }
}

// The same for 8-bit pages with the oracle: 16-bit rows are quantised by the append.
TEST(KvPages, QuantisedPagesAreReadAsQuantisedRows) {
  std::mt19937_64 random(TestSeed());
  ThreadPool pool(2);
  for (const KvDType kv_dtype : {KvDType::kFloat8E4M3, KvDType::kInt8}) {
    const Geometry geometry{DType::kBFloat16, 4, 2, 64, kv_dtype};
    const PageLayout layout = PageLayoutOf(geometry);
    Problem problem(geometry, {{2, 300, Mask::Causal()}}, &random);
    Span span = problem.span(0).span();
    const AttentionBatch batch{geometry, &span, 1};
    const AttentionResult want = ReferenceAttention(batch);

    const WrittenPages written(layout, problem.span(0).unquantised().kv, &pool, &random);
    span.kv = written.view;
    const AttentionResult got = ReferenceAttention(batch);
    EXPECT_EQ(got.output, want.output);
    EXPECT_EQ(got.lse, want.lse);
  }
}

}  // namespace
}  // namespace flashcore::kernels
