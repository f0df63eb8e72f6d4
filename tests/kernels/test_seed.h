// The seed of every random test in this folder.
#ifndef FLASHCORE_TESTS_KERNELS_TEST_SEED_H_
#define FLASHCORE_TESTS_KERNELS_TEST_SEED_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace flashcore::kernels {

// New in every process and printed by it, unless FLASHCORE_TEST_SEED is set.
inline uint64_t TestSeed() {
  static const uint64_t kSeed = [] {
    const char* asked = std::getenv("FLASHCORE_TEST_SEED");
    const uint64_t seed =
        asked != nullptr ? std::strtoull(asked, nullptr, 10) : std::random_device{}();
    std::cout << "FLASHCORE_TEST_SEED=" << seed << std::endl;
    return seed;
  }();
  return kSeed;
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_TEST_SEED_H_
