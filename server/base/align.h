#ifndef FLASHCORE_SERVER_BASE_ALIGN_H_
#define FLASHCORE_SERVER_BASE_ALIGN_H_

#include <cstddef>

namespace flashcore::server {

// Rounds `bytes` up to a multiple of `alignment`.
constexpr size_t AlignUp(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_ALIGN_H_
