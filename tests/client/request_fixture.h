// A small request with its memory, for the client's tests.
#ifndef FLASHCORE_TESTS_CLIENT_REQUEST_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_REQUEST_FIXTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "flashcore/attend.h"

namespace flashcore {

// Two spans of 3 and 2 query rows over 4 and 0 K/V rows, 4 query heads over 2, head_dim 8.
// Owns its memory; the request points into it.
class RequestFixture {
 public:
  explicit RequestFixture(const std::string& request_id = "r", bool lse = true) {
    request.request_id = request_id;
    request.spans = {{3, 4}, {2, 0}};
    request.num_heads = 4;
    request.num_kv_heads = 2;
    request.head_dim = 8;
    query.resize(request.QueryBytes());
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<std::byte>(i * 7);
    key.assign(request.KvBytes(), std::byte{1});
    value.assign(request.KvBytes(), std::byte{2});
    output.resize(query.size());
    if (lse) lse_values.resize(request.LseElements());
    request.query = query;
    request.key = key;
    request.value = value;
    request.output = absl::MakeSpan(output);
    request.lse = absl::MakeSpan(lse_values);
  }
  RequestFixture(const RequestFixture&) = delete;
  RequestFixture& operator=(const RequestFixture&) = delete;

  AttendRequest request;
  std::vector<std::byte> query, key, value, output;
  std::vector<float> lse_values;
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_REQUEST_FIXTURE_H_
