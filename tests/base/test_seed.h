// The seed of tests with random inputs.
#ifndef FLASHCORE_TESTS_BASE_TEST_SEED_H_
#define FLASHCORE_TESTS_BASE_TEST_SEED_H_

#include <cstdlib>
#include <iostream>

namespace flashcore {

// The same in every run, unless FLASHCORE_TEST_SEED is set, as `tests/run.sh --stress` does.
// Printed, so that a run can be repeated.
inline unsigned TestSeed() {
  const char* asked = std::getenv("FLASHCORE_TEST_SEED");
  const unsigned seed =
      asked != nullptr ? static_cast<unsigned>(std::strtoul(asked, nullptr, 10)) : 1;
  std::cout << "FLASHCORE_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_BASE_TEST_SEED_H_
