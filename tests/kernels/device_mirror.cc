#include "tests/kernels/device_mirror.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace flashcore::kernels {
namespace {

// Bytes between ranges. They expose reads and writes past the end of a range.
constexpr size_t kGap = 4096;
// Ranges keep their address modulo this, and so their alignment.
constexpr size_t kAlignment = 256;

void ExpectOk(cudaError_t error, const char* what) {
  EXPECT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}

}  // namespace

std::string WhyNoDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(error);
  return count > 0 ? "" : "no CUDA device";
}

DeviceMirror::~DeviceMirror() { cudaFree(device_); }

void DeviceMirror::Add(const void* begin, size_t bytes, Access access) {
  if (bytes == 0) return;
  const auto* from = static_cast<const std::byte*>(begin);
  ranges_.push_back({from, from + bytes, access});
}

void DeviceMirror::Allocate() {
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> merged;
  for (const Range& range : ranges_) {
    if (merged.empty() || range.begin >= merged.back().end) {
      merged.push_back(range);
      continue;
    }
    merged.back().end = std::max(merged.back().end, range.end);
    if (range.access == Access::kWrite) merged.back().access = Access::kWrite;
  }
  ranges_ = std::move(merged);
  size_t size = kGap;
  for (Range& range : ranges_) {
    size = (size + kAlignment - 1) / kAlignment * kAlignment;
    range.offset = size + reinterpret_cast<uintptr_t>(range.begin) % kAlignment;
    size = range.offset + (range.end - range.begin) + kGap;
  }
  image_.assign(size, std::byte{0xff});
  ExpectOk(cudaMalloc(reinterpret_cast<void**>(&device_), size), "cudaMalloc");
}

const void* DeviceMirror::Translate(const void* host) const {
  const auto* at = static_cast<const std::byte*>(host);
  for (const Range& range : ranges_) {
    if (at >= range.begin && at < range.end) return device_ + range.offset + (at - range.begin);
  }
  return nullptr;
}

void DeviceMirror::Upload() {
  for (const Range& range : ranges_) {
    std::memcpy(image_.data() + range.offset, range.begin, range.end - range.begin);
  }
  ExpectOk(cudaMemcpy(device_, image_.data(), image_.size(), cudaMemcpyHostToDevice), "upload");
}

void DeviceMirror::Download() {
  ExpectOk(cudaDeviceSynchronize(), "kernel");
  std::vector<std::byte> got(image_.size());
  ExpectOk(cudaMemcpy(got.data(), device_, got.size(), cudaMemcpyDeviceToHost), "download");
  for (const Range& range : ranges_) {
    if (range.access != Access::kWrite) continue;
    const size_t bytes = range.end - range.begin;
    std::memcpy(const_cast<std::byte*>(range.begin), got.data() + range.offset, bytes);
    std::memcpy(image_.data() + range.offset, got.data() + range.offset, bytes);
  }
  EXPECT_TRUE(got == image_) << "read-only device memory has changed";
}

}  // namespace flashcore::kernels
