// Memory that both sides map: a sealed memfd. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_REGION_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_REGION_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "client/cpp/local/socket.h"

namespace flashcore::client::local {

// A mapped memfd that is sealed against shrinking. Its memory is reserved, and zero at first.
class Region {
 public:
  // Rounded up to whole pages. RESOURCE_EXHAUSTED if this host has no memory.
  static absl::StatusOr<std::unique_ptr<Region>> Create(size_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  Region(UniqueFd fd, std::byte* data, size_t bytes)
      : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

  const UniqueFd fd_;
  std::byte* const data_;
  const size_t bytes_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_REGION_H_
