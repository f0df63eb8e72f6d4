// A POSIX shared-memory segment of a test, as a client would make it.
#ifndef FLASHCORE_TESTS_MEMORY_TEST_SEGMENT_H_
#define FLASHCORE_TESTS_MEMORY_TEST_SEGMENT_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/memory/shared_region.h"

namespace flashcore::server::testing {

class TestSegment {
 public:
  explicit TestSegment(size_t bytes) : bytes_(bytes) {
    static int number = 0;
    name_ = absl::StrCat("/flashcore-test-", getpid(), "-", ++number);
    fd_ = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    EXPECT_GE(fd_, 0);
    Resize(bytes);
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    EXPECT_NE(data, MAP_FAILED);
    data_ = static_cast<std::byte*>(data);
  }
  ~TestSegment() {
    munmap(data_, bytes_);
    close(fd_);
    shm_unlink(name_.c_str());
  }
  TestSegment(const TestSegment&) = delete;
  TestSegment& operator=(const TestSegment&) = delete;

  const std::string& name() const { return name_; }
  size_t bytes() const { return bytes_; }
  std::byte* data() const { return data_; }  // do not touch it beyond a new end
  void Resize(size_t bytes) { EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }

  // Maps it as the server does.
  std::unique_ptr<SharedRegion> Map(bool read_only = false) const {
    return SharedRegion::Map(SharedSegment::Open(name_, bytes_, read_only).value()).value();
  }

 private:
  const size_t bytes_;
  std::string name_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_MEMORY_TEST_SEGMENT_H_
