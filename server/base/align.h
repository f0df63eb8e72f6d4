#ifndef FLASHCORE_SERVER_BASE_ALIGN_H_
#define FLASHCORE_SERVER_BASE_ALIGN_H_

#include <cstddef>

namespace flashcore::server {

// The next multiple of `alignment` from `bytes` on.
constexpr size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_ALIGN_H_
