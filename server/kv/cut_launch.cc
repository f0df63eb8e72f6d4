#include "server/kv/cut_launch.h"

#include <algorithm>

namespace flashcore::server {

bool CutLaunch::Next() {
  AttendOperation* const operation = launch.operations.front();
  times.copy_in += operation->times.copy_in;
  times.kernel += operation->times.kernel;
  times.copy_out += operation->times.copy_out;
  if (++done == parts.size()) {
    operation->times.copy_in = times.copy_in;
    operation->times.kernel = times.kernel;
    operation->times.copy_out = times.copy_out;
    return false;
  }
  launch.copies.clear();
  launch.appends.clear();
  launch.part = parts[done];
  launch.is_last_part = done + 1 == parts.size();
  operation->work = std::max(part_work * static_cast<int64_t>(parts.size() - done), Nanoseconds(1));
  return true;
}

}  // namespace flashcore::server
