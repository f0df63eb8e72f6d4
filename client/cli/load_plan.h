// Which worker of a load sends what. Internal to load.cc. Functions are thread-safe.
#ifndef FLASHCORE_CLIENT_CLI_LOAD_PLAN_H_
#define FLASHCORE_CLIENT_CLI_LOAD_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/load.h"
#include "client/cli/load_worker.h"
#include "client/cli/resident_context.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// Rows by which a decoding sequence grows before it is truncated back to its context.
inline constexpr uint32_t kDecodeGrowth = 64;

// Whether worker `index` of `workers` prefills: in mixed, every fourth does, and at least one.
bool Prefills(BenchMode mode, int index, int workers);

// Sequences of worker `index`: equal shares, the first ones get one more each of what is left over.
int ShareOf(int64_t sequences, int index, int workers);

// RESOURCE_EXHAUSTED if a request of the load would be over a limit that the server has told.
absl::Status CheckAgainstServer(const LoadOptions& options, Client* client);

// Null unless sequences are to be forked.
std::unique_ptr<SharedPrefix> MakePrefix(const LoadOptions& options, Client* client);

// What worker `index` sends, the main kind first. Pointers outlive the loads; `prefix` may be null.
std::vector<WorkerLoad> MakeLoads(const LoadOptions& options, int index, Client* client,
                                  SharedPrefix* prefix);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_LOAD_PLAN_H_
