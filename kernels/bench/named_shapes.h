// The shapes that the kernel benchmark knows by name, and the grammar of all others:
//
//   SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal][,window=LEFT:RIGHT][,paged]
//
// ROWS is the K/V rows of a span, and its query rows unless q says otherwise. K and V are dense,
// [kv_heads, rows, head_dim], unless they are paged.
#ifndef FLASHCORE_KERNELS_BENCH_NAMED_SHAPES_H_
#define FLASHCORE_KERNELS_BENCH_NAMED_SHAPES_H_

#include <string>
#include <vector>

#include "kernels/bench/shape.h"

namespace flashcore::kernels {

struct BenchShape {
  std::string name;
  AttentionShape attention;
  bool paged = false;
};

struct NamedShape {
  const char* name;
  const char* shape;  // by the grammar
};

const std::vector<NamedShape>& NamedShapes();

// Parses a name of NamedShapes(), or a shape by the grammar, which is then its own name. The dtype
// stays the default. Returns what is wrong with `text`; empty if nothing is.
std::string ParseShape(const std::string& text, BenchShape* shape);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_NAMED_SHAPES_H_
