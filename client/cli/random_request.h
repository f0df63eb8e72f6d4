// Requests with random inputs, and the memory behind them.
#ifndef FLASHCORE_CLIENT_CLI_RANDOM_REQUEST_H_
#define FLASHCORE_CLIENT_CLI_RANDOM_REQUEST_H_

#include <cstdint>
#include <random>
#include <vector>

#include "client/cpp/attend.h"

namespace flashcore::cli {

// The bits of NaN in either dtype.
inline constexpr uint16_t kNanBits = 0x7fff;

// Owns Q, K, V, O and LSE of a request. Not copyable: the request points into it.
class RandomRequest {
 public:
  // Takes shapes, dtype, layout and mask from `shape`. Elements of Q, K and V are uniform in
  // [-magnitude, magnitude]; O and LSE are NaN.
  RandomRequest(const AttendRequest& shape, bool want_lse, float magnitude,
                std::mt19937_64* random);
  RandomRequest(const RandomRequest&) = delete;
  RandomRequest& operator=(const RandomRequest&) = delete;

  AttendRequest& request() { return request_; }
  std::vector<uint16_t>& output() { return output_; }

 private:
  AttendRequest request_;
  std::vector<uint16_t> query_, key_, value_, output_;
  std::vector<float> lse_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_RANDOM_REQUEST_H_
