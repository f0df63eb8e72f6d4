// Mirrors host memory on the current CUDA device, so that tests with data in host memory can run a
// kernel that needs device pointers.
#ifndef FLASHCORE_TESTS_KERNELS_DEVICE_MIRROR_H_
#define FLASHCORE_TESTS_KERNELS_DEVICE_MIRROR_H_

#include <cstddef>
#include <string>
#include <vector>

namespace flashcore::kernels {

// Why there is no CUDA device to run tests on; empty if there is one.
std::string WhyNoDevice();

// Use: Add every range, Allocate, translate pointers with At, Upload, run, Download. Failures of
// the device are GoogleTest failures.
class DeviceMirror {
 public:
  enum class Access { kRead, kWrite };

  DeviceMirror() = default;
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  // Mirrors [begin, begin + bytes). Overlapping ranges are merged.
  void Add(const void* begin, size_t bytes, Access access);
  void Allocate();
  // The device address of `host`; null if it is in no range.
  template <class T>
  T* At(T* host) const {
    return static_cast<T*>(const_cast<void*>(Translate(host)));
  }
  // Copies all ranges to the device. Device memory between them has all bits set, which is NaN.
  void Upload();
  // Waits for the device and copies the kWrite ranges back. Fails if other device memory of the
  // mirror has changed.
  void Download();

 private:
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    Access access;
    size_t offset = 0;  // in device memory
  };

  const void* Translate(const void* host) const;

  std::vector<Range> ranges_;
  std::vector<std::byte> image_;  // content of the device memory after Upload
  std::byte* device_ = nullptr;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_DEVICE_MIRROR_H_
