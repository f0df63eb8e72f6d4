// The shared memory that a server knows, by address. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_REGION_TABLE_H_
#define FLASHCORE_CLIENT_CPP_REGION_TABLE_H_

#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

// Thread-safe.
class RegionTable {
 public:
  struct Region {
    size_t bytes = 0;
    std::string id;
    bool read_only = false;  // for the server
  };

  void Add(const void* data, Region region);
  void Remove(const void* data);  // nothing if it is not there

  // Where `bytes` at `data` lie, if all of them lie in one region, the server may do there what is
  // asked, and they are aligned as the contract wants. None otherwise, and if there are none.
  std::optional<v1::MemoryRange> Find(const void* data, size_t bytes, bool to_write) const;

 private:
  mutable absl::Mutex mutex_;
  std::map<const std::byte*, Region> regions_ ABSL_GUARDED_BY(mutex_);  // by first byte
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_REGION_TABLE_H_
