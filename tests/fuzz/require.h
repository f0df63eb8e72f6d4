// How a fuzzer reports a finding.
#ifndef FLASHCORE_TESTS_FUZZ_REQUIRE_H_
#define FLASHCORE_TESTS_FUZZ_REQUIRE_H_

#include <cstdio>
#include <cstdlib>
#include <string>

namespace flashcore::fuzz {

// Ends the process unless `holds`. libFuzzer then keeps the input.
inline void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "fuzzer: %s\n", what.c_str());
  std::abort();
}

}  // namespace flashcore::fuzz

#endif  // FLASHCORE_TESTS_FUZZ_REQUIRE_H_
