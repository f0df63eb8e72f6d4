#include <cstdlib>

#include "absl/synchronization/mutex.h"
#include "client/bench/commands.h"
#include "client/cli/command.h"

int main(int argc, char** argv) {
  namespace cli = flashcore::cli;
  // As in the server: bench must not measure Abseil's search for deadlocks.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);  // what goes wrong is in the status
  return cli::Main({cli::InfoCommand(), cli::AttendCommand(), cli::VerifyCommand(),
                    cli::BenchCommand(), cli::SequencesCommand(), cli::HealthCommand()},
                   std::vector<std::string>(argv + 1, argv + argc));
}
