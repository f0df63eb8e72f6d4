#include "tests/bench/kernels/shape.h"

#include <charconv>
#include <cmath>
#include <string_view>

#include "kernels/plan.h"

namespace flashcore::kernels {
namespace {

// Consumes a text from the left.
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

// One of q=QUERY_ROWS, causal, window=LEFT:RIGHT, paged, prefix=ROWS
bool TakeOption(Cursor* cursor, AttentionShape* shape) {
  if (cursor->Take("q=")) return cursor->TakeNumber(1, &shape->query_rows);
  if (cursor->Take("window=")) {
    return cursor->TakeNumber(0, &shape->mask.left) && cursor->Take(":") &&
           cursor->TakeNumber(0, &shape->mask.right);
  }
  if (cursor->Take("causal")) {
    shape->mask = Mask::Causal();
    return true;
  }
  shape->paged = true;
  if (cursor->Take("prefix=")) return cursor->TakeNumber(1, &shape->prefix_rows);
  return cursor->Take("paged");
}

// Returns whether the whole text follows the grammar. If not, the cursor stays at the first part
// that does not.
bool TakeShape(Cursor* cursor, AttentionShape* shape) {
  if (!TakeDimensions(cursor, shape)) return false;
  while (cursor->Take(",")) {
    if (!TakeOption(cursor, shape)) return false;
  }
  return cursor->done();
}

KvView MakeKv(const AttentionShape& shape, const Tensors& tensors, int32_t s) {
  const bool paged = tensors.pages != nullptr;
  KvView kv;
  kv.rows = shape.kv_rows;
  kv.row_stride = shape.head_dim * shape.geometry().kv_element_bytes();
  kv.head_stride = (paged ? kPageTokens : shape.kv_rows) *
                   (kv.row_stride + static_cast<int64_t>(KvRowScaleBytes(shape.kv_dtype)));
  const int64_t all_heads = shape.num_kv_heads * kv.head_stride;
  if (paged) {
    kv.page_stride = 2 * all_heads;
    kv.key = tensors.key;
    kv.value = tensors.key + all_heads;
    kv.pages = tensors.pages + int64_t{s} * PagesFor(shape.kv_rows);
  } else {
    kv.page_stride = kPageTokens * kv.row_stride;
    kv.key = tensors.key + s * all_heads;
    kv.value = tensors.value + s * all_heads;
  }
  return kv;
}

}  // namespace

std::string ParseShape(const std::string& text, BenchShape* shape) {
  std::string_view grammatical = text;
  for (const NamedShape& named : kNamedShapes) {
    if (text == named.name) grammatical = named.shape;
  }
  *shape = {text, {}};
  AttentionShape& parsed = shape->attention;
  Cursor cursor(grammatical);
  if (!TakeShape(&cursor, &parsed)) {
    return "shape '" + text + "' is no known name, and is no " +
           "SPANSxHEADS[/KV_HEADS]xROWSxHEAD_DIM[,q=QUERY_ROWS][,causal][,window=LEFT:RIGHT]" +
           "[,paged][,prefix=ROWS] from '" + cursor.rest() + "' on";
  }
  if (parsed.num_heads % parsed.num_kv_heads != 0) {
    return "shape '" + text + "': " + std::to_string(parsed.num_kv_heads) +
           " KV heads do not divide " + std::to_string(parsed.num_heads) + " heads";
  }
  if (parsed.prefix_rows % kPageTokens != 0 || parsed.prefix_rows > parsed.kv_rows) {
    return "shape '" + text + "': a prefix of " + std::to_string(parsed.prefix_rows) +
           " rows is not a multiple of 64 up to " + std::to_string(parsed.kv_rows);
  }
  return "";
}

double Flops(const AttentionShape& shape) {
  double pairs = 0;
  for (int32_t i = 0; i < shape.query_rows; ++i) {
    const KvRange visible = VisibleKv(shape.mask, shape.query_rows, shape.kv_rows, i, i + 1);
    pairs += visible.end - visible.begin;
  }
  return 4.0 * pairs * shape.head_dim * shape.num_heads * shape.spans;
}

int64_t QueryBytes(const AttentionShape& shape) {
  const int64_t row = shape.head_dim * DTypeBytes(shape.dtype);
  return row * shape.query_rows * shape.num_heads * shape.spans;
}

int64_t KvBytes(const AttentionShape& shape) {
  const int64_t row = shape.head_dim * KvElementBytes(shape.dtype, shape.kv_dtype) +
                      KvRowScaleBytes(shape.kv_dtype);
  return 2 * row * shape.kv_rows * shape.num_kv_heads * shape.spans;
}

int64_t StoredKvBytes(const AttentionShape& shape) {
  AttentionShape prefix = shape;
  prefix.spans = shape.spans - 1;
  prefix.kv_rows = shape.prefix_rows;
  return KvBytes(shape) - KvBytes(prefix);
}

int64_t SetBytes(const AttentionShape& shape) {
  return 2 * QueryBytes(shape) + StoredKvBytes(shape);
}

std::vector<int32_t> PageTable(const AttentionShape& shape) {
  const int32_t prefix = shape.prefix_rows / kPageTokens;
  int32_t next_page = prefix;
  std::vector<int32_t> pages;
  for (int32_t s = 0; s < shape.spans; ++s) {
    for (int32_t p = 0; p < PagesFor(shape.kv_rows); ++p) {
      pages.push_back(p < prefix ? p : next_page++);
    }
  }
  return pages;
}

std::vector<Span> MakeSpans(const AttentionShape& shape, const Tensors& tensors) {
  std::vector<Span> spans(shape.spans);
  for (int32_t s = 0; s < shape.spans; ++s) {
    Span& span = spans[s];
    span.row_stride = shape.head_dim * DTypeBytes(shape.dtype);
    span.head_stride = shape.query_rows * span.row_stride;
    span.query = tensors.query + s * shape.num_heads * span.head_stride;
    span.output = tensors.output + s * shape.num_heads * span.head_stride;
    span.query_rows = shape.query_rows;
    span.kv = MakeKv(shape, tensors, s);
    span.terms = {shape.mask, 1 / std::sqrt(static_cast<float>(shape.head_dim))};
  }
  return spans;
}

}  // namespace flashcore::kernels
