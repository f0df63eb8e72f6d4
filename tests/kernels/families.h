// The problems that every kernel is compared with the oracle on. bounds_test.cc shows for each that
// its error bound rejects faults.
#ifndef FLASHCORE_TESTS_KERNELS_FAMILIES_H_
#define FLASHCORE_TESTS_KERNELS_FAMILIES_H_

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "tests/kernels/forked_kv.h"
#include "tests/kernels/problem.h"

namespace flashcore::kernels {

// A span over forked K/V.
struct ForkedSpan {
  ForkShape kv;
  int32_t query_rows = 1;
  Mask mask = Mask::Causal();
};

// Problems of one name share a test; they differ in their heads.
struct Family {
  std::string name;
  int32_t heads = 1;
  int32_t kv_heads = 1;
  std::vector<SpanShape> shapes = {};  // or:
  std::vector<ForkedSpan> forked =
      {};                          // these share pages; the last two have another softmax_scale
  std::vector<float> scales = {};  // factors of the usual softmax_scale of each span; or none
  bool long_kv = false;            // more than 32,768 rows: not compared with unfused attention
  bool fits_float16_sums = true;   // no q.k exceeds 65504, the largest float16
};

const std::vector<Family>& AllFamilies();
// Those of one name, at least one.
std::vector<Family> FamiliesNamed(const std::string& name);

// The problem of a family with the dtypes and head_dim of `geometry`, and the K/V it points to.
class FamilyProblem {
 public:
  FamilyProblem(const Family& family, Geometry geometry, std::mt19937_64* random);

  Problem* get() { return problem_.get(); }
  Problem* operator->() { return problem_.get(); }
  ForkedKv* forked_kv() { return forked_kv_.get(); }  // null without forks

 private:
  std::unique_ptr<ForkedKv> forked_kv_;
  std::unique_ptr<Problem> problem_;
};

// A tree of forks: tails of several lengths and none, forks of forks, one span that no other can
// share with.
const std::vector<ForkedSpan>& ForkTree();
inline constexpr int32_t kSplitPages = 8;  // of 512 K/V rows

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_FAMILIES_H_
