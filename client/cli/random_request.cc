#include "client/cli/random_request.h"

#include <cmath>

#include "kernels/half.h"

namespace flashcore::cli {
namespace {

void Fill(DType dtype, float magnitude, size_t bytes, std::mt19937_64* random,
          std::vector<uint16_t>* out) {
  const kernels::DType kernel_dtype =
      dtype == DType::kFloat16 ? kernels::DType::kFloat16 : kernels::DType::kBFloat16;
  out->resize(bytes / sizeof(uint16_t));
  for (uint16_t& element : *out) {
    // The top 24 bits, as a number from -1 to 1: faster than a standard distribution.
    const float unit = static_cast<float>((*random)() >> 40) * 0x1p-23f - 1.0f;
    element = kernels::FromFloat(kernel_dtype, unit * magnitude);
  }
}

absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements) {
  return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * sizeof(uint16_t)};
}

}  // namespace

RandomRequest::RandomRequest(const AttendRequest& shape, bool want_lse, float magnitude,
                             std::mt19937_64* random)
    : request_(shape) {
  Fill(shape.dtype, magnitude, shape.QueryBytes(), random, &query_);
  Fill(shape.dtype, magnitude, shape.KvBytes(), random, &key_);
  Fill(shape.dtype, magnitude, shape.KvBytes(), random, &value_);
  output_.assign(query_.size(), kNanBits);
  if (want_lse) lse_.assign(shape.LseElements(), std::nanf(""));
  request_.query = Bytes(query_);
  request_.key = Bytes(key_);
  request_.value = Bytes(value_);
  request_.output = {reinterpret_cast<std::byte*>(output_.data()), output_.size() * 2};
  request_.lse = absl::MakeSpan(lse_);
}

}  // namespace flashcore::cli
