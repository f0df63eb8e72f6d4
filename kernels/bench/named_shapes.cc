#include "kernels/bench/named_shapes.h"

#include <charconv>
#include <string_view>

namespace flashcore::kernels {
namespace {

// Eats a text from the left.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : rest_(text) {}

  bool done() const { return rest_.empty(); }
  std::string rest() const { return std::string(rest_); }

  bool Take(std::string_view prefix) {
    if (rest_.substr(0, prefix.size()) != prefix) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }

  // A decimal number from `least` to the largest int32_t.
  bool TakeNumber(int32_t least, int32_t* number) {
    const char* begin = rest_.data();
    const auto [end, error] = std::from_chars(begin, begin + rest_.size(), *number);
    if (error != std::errc() || *number < least) return false;
    rest_.remove_prefix(end - begin);
    return true;
  }

 private:
  std::string_view rest_;
};

// SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM
bool TakeDimensions(Cursor* cursor, AttentionShape* shape) {
  if (!cursor->TakeNumber(1, &shape->spans) || !cursor->Take("x")) return false;
  if (!cursor->TakeNumber(1, &shape->num_heads)) return false;
  shape->num_kv_heads = shape->num_heads;
  if (cursor->Take("/") && !cursor->TakeNumber(1, &shape->num_kv_heads)) return false;
  if (!cursor->Take("x") || !cursor->TakeNumber(1, &shape->kv_rows)) return false;
  shape->query_rows = shape->kv_rows;
  return cursor->Take("x") && cursor->TakeNumber(1, &shape->head_dim);
}

// One of q=QUERY_ROWS, causal, window=LEFT:RIGHT, paged
bool TakeOption(Cursor* cursor, BenchShape* shape) {
  Mask& mask = shape->attention.mask;
  if (cursor->Take("q=")) return cursor->TakeNumber(1, &shape->attention.query_rows);
  if (cursor->Take("window=")) {
    return cursor->TakeNumber(0, &mask.left) && cursor->Take(":") &&
           cursor->TakeNumber(0, &mask.right);
  }
  if (cursor->Take("causal")) {
    mask = Mask::Causal();
    return true;
  }
  shape->paged = true;
  return cursor->Take("paged");
}

// Returns whether all of it is as the grammar says; otherwise the cursor stays at what is not.
bool TakeShape(Cursor* cursor, BenchShape* shape) {
  if (!TakeDimensions(cursor, &shape->attention)) return false;
  while (cursor->Take(",")) {
    if (!TakeOption(cursor, shape)) return false;
  }
  return cursor->done();
}

}  // namespace

const std::vector<NamedShape>& NamedShapes() {
  static const auto* const kShapes = new std::vector<NamedShape>{
      {"mission", "1x8x512x64"},
      {"mission_causal", "1x8x512x64,causal"},
      {"seed2", "2x8x256x64"},
      {"canon_3", "2x8x512x64"},
      {"b8", "8x8x512x64"},
      {"long", "1x8x2048x64"},
      {"long_causal", "1x8x2048x64,causal"},
      {"canon_1", "4x16x2048x128"},
      {"canon_1_causal", "4x16x2048x128,causal"},
      {"prefill", "1x32/8x8192x128,causal"},
      {"decode1", "1x32/8x4096x128,q=1"},
      {"decode16", "16x32/8x4096x128,q=1"},
      {"decode64", "64x32/8x4096x128,q=1"},
      {"decode_small", "1x8x512x64,q=1"},
  };
  return *kShapes;
}

std::string ParseShape(const std::string& text, BenchShape* shape) {
  std::string_view grammatical = text;
  for (const NamedShape& named : NamedShapes()) {
    if (text == named.name) grammatical = named.shape;
  }
  *shape = {text, {}, false};
  Cursor cursor(grammatical);
  if (!TakeShape(&cursor, shape)) {
    return "shape '" + text + "' is no known name, and is no " +
           "SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal][,window=LEFT:RIGHT]" +
           "[,paged] from '" + cursor.rest() + "' on";
  }
  const Geometry geometry = shape->attention.geometry();
  if (geometry.num_heads % geometry.num_kv_heads != 0) {
    return "shape '" + text + "': " + std::to_string(geometry.num_kv_heads) +
           " KV heads do not divide " + std::to_string(geometry.num_heads) + " heads";
  }
  return "";
}

}  // namespace flashcore::kernels
