#include "server/kv/launch.h"

#include "server/request/spans.h"

namespace flashcore::server {

void AppendSpans(const Launch& launch, const std::byte* arena, const int32_t* pages,
                 std::vector<kernels::Span>* spans) {
  const kernels::PageLayout layout = launch.page_layout();
  auto resident = launch.resident.begin();
  int32_t index = 0;  // of a span in the launch
  for (const AttendOperation* operation : launch.operations) {
    const AttendRequest& request = operation->request;
    if (request.append_only) continue;
    SpanCursor cursor(request, operation->tensors.addresses());
    for (const SpanShape& shape : request.spans) {
      spans->push_back(InlineSpan(request, shape, cursor.tensors()));
      spans->back().slices = launch.part.SlicesOf(index++);
      if (!shape.sequence_id.empty()) {
        kernels::KvView& kv = spans->back().kv;
        kv = kernels::KvView();
        kv.key = arena;
        kv.value = arena + layout.value_offset();
        kv.pages = pages + resident->first_page;
        kv.page_stride = Arena::kUnitBytes;
        kv.head_stride = layout.head_bytes();
        kv.row_stride = layout.row_bytes();
        kv.rows = resident->rows;
        ++resident;
      }
      cursor.Advance();
    }
  }
}

}  // namespace flashcore::server
