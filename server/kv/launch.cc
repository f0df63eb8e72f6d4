#include "server/kv/launch.h"

#include "server/kv/arena.h"
#include "server/request/spans.h"

namespace flashcore::server {
namespace {

kernels::KvView ResidentView(const kernels::PageLayout& layout, const std::byte* arena,
                             const int32_t* pages, int32_t rows) {
  kernels::KvView kv;
  kv.key = arena;
  kv.value = arena + layout.value_offset();
  kv.pages = pages;
  kv.page_stride = Arena::kUnitBytes;
  kv.head_stride = layout.head_bytes();
  kv.row_stride = layout.row_bytes();
  kv.rows = rows;
  return kv;
}

}  // namespace

void AppendSpans(const Launch& launch, const std::byte* arena, const int32_t* pages,
                 std::vector<kernels::Span>* spans) {
  auto resident = launch.resident.begin();
  for (const AttendOperation* operation : launch.operations) {
    const AttendRequest& request = operation->request;
    if (request.append_only) continue;
    SpanCursor cursor(request, operation->tensors.addresses());
    for (const SpanShape& shape : request.spans) {
      spans->push_back(InlineSpan(request, shape, cursor.tensors()));
      if (!shape.sequence_id.empty()) {
        spans->back().kv =
            ResidentView(launch.page_layout(), arena, pages + resident->first_page, resident->rows);
        ++resident;
      }
      cursor.Advance();
    }
  }
}

}  // namespace flashcore::server
