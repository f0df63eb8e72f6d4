// The files that flags such as --token_file name: how they are read, and what is said when one
// cannot be used.
#ifndef FLASHCORE_SERVER_TELEMETRY_CREDENTIAL_FILE_H_
#define FLASHCORE_SERVER_TELEMETRY_CREDENTIAL_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// A credential file: given, so it must be usable. Whoever reads one parses what Read returns, which
// is never empty, and reports what is wrong with it by Error.
struct CredentialFile {
  const char* flag;  // "--token_file"
  std::string path;

  // The whole file. An Error unless it is a regular file of at most 1 MiB with text in it: an empty
  // or blank one looks like a secret that has not been filled yet.
  absl::StatusOr<std::string> Read() const;

  // INVALID_ARGUMENT that names the flag, the path and the problem.
  absl::Status Error(absl::string_view problem) const;
};

// Says once for each problem that a changed file cannot be used, and counts it. Not thread-safe.
class ReloadReport {
 public:
  // `failures` outlives this; null: nothing is counted.
  explicit ReloadReport(Counter* failures) : failures_(failures) {}

  // After each look at the files.
  void Looked(const absl::Status& status);

 private:
  Counter* const failures_;
  std::string last_;  // the problem at the last look; empty: none
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_CREDENTIAL_FILE_H_
