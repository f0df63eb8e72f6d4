#include "client/cli/command.h"

int main(int argc, char** argv) {
  return flashcore::cli::Main(std::vector<std::string>(argv + 1, argv + argc));
}
