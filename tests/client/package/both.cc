// The C and the C++ library share a process.
#include <cstdio>

#include "absl/status/status.h"
#include "flashcore/c.h"
#include "flashcore/client.h"

int main() {
  flashcore_client* c_client = nullptr;
  const int code = flashcore_connect("local:/nonexistent/s", "both", nullptr, &c_client);
  const auto client = flashcore::Client::Create("local:/nonexistent/s");
  const auto info = client.ok() ? (*client)->GetServerInfo().status() : client.status();
  std::printf("%d: %s\n%s\n", code, flashcore_last_error(), info.ToString().c_str());
  return code == 14 && !info.ok() ? 0 : 1;
}
