// In a file of its own, which is built without sanitizers: they call sysconf before they are ready
// for code of theirs, even for a load of std::atomic.
#include <unistd.h>

#include "server/base/cores.h"

// glibc's own, whatever program or library defines a sysconf.
extern "C" long __sysconf(int name);  // NOLINT(bugprone-reserved-identifier)

namespace flashcore::server {
namespace {

int g_visible_cores = 0;  // 0: the machine's

}  // namespace

void SetVisibleCores(int cores) { __atomic_store_n(&g_visible_cores, cores, __ATOMIC_RELAXED); }

}  // namespace flashcore::server

extern "C" {

// Libraries call this one, too.
__attribute__((visibility("default"))) long sysconf(int name) noexcept {
  const int cores = __atomic_load_n(&flashcore::server::g_visible_cores, __ATOMIC_RELAXED);
  return name == _SC_NPROCESSORS_CONF && cores > 0 ? cores : __sysconf(name);
}

}  // extern "C"
