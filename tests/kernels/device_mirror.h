// Host memory mirrored on the current CUDA device, so that tests whose data lives in host memory
// can run a kernel that wants device pointers.
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

  // Mirrors [begin, begin + bytes). Ranges may overlap; those that do become one.
  void Add(const void* begin, size_t bytes, Access access);
  void Allocate();
  // The device's address of what is at `host`; null if that is in no range.
  template <class T>
  T* At(T* host) const {
    return static_cast<T*>(const_cast<void*>(Translate(host)));
  }
  // Sends all ranges. What lies between them on the device is all ones: NaN, as a number.
  void Upload();
  // Waits for the device and fetches what it may have written. It is a failure if anything else of
  // the mirror's device memory has changed.
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
  std::vector<std::byte> image_;  // of the device's memory, as sent
  std::byte* device_ = nullptr;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_DEVICE_MIRROR_H_
