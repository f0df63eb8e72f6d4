// Requests with random tensors for an Engine, and their float64 reference.
#ifndef FLASHCORE_TESTS_ENGINE_ATTEND_JOB_H_
#define FLASHCORE_TESTS_ENGINE_ATTEND_JOB_H_

#include <cmath>
#include <cstring>
#include <future>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/half.h"
#include "kernels/oracle/reference.h"
#include "server/engine/engine.h"
#include "server/kv/operation.h"
#include "server/request/spans.h"
#include "server/request/tensors.h"
#include "tests/base/test_seed.h"
#include "tests/engine/fakes.h"

namespace flashcore::server::testing {

// An operation, its inputs, and its status.
struct AttendJob {
  AttendJob() {
    std::promise<absl::Status> promise;
    ended = promise.get_future();
    operation.identity.name = "alice";
    operation.done = [promise = std::move(promise)](absl::Status status) mutable {
      promise.set_value(std::move(status));
    };
  }

  AttendOperation operation;
  std::future<absl::Status> ended;
  std::vector<std::byte> query, key, value;  // copies, since staging memory is released

  TensorAddresses addresses() const {
    return {query.data(), key.data(), value.data(), operation.tensors.output(), nullptr};
  }
};

// In [-1, 1], where the spacing of FP16 and BF16 is well below the tolerances.
inline std::vector<std::byte> RandomTensor(size_t bytes, kernels::DType dtype,
                                           std::mt19937* random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::byte> tensor(bytes);
  for (size_t i = 0; i < bytes; i += 2) {
    const uint16_t element = kernels::FromFloat(dtype, uniform(*random));
    std::memcpy(&tensor[i], &element, 2);
  }
  return tensor;
}

// Random inputs for the job's request.
inline void FillTensors(AttendJob* job, std::mt19937* random) {
  const AttendRequest& request = job->operation.request;
  job->query = RandomTensor(request.query_bytes, request.dtype, random);
  job->key = RandomTensor(request.key_bytes, request.dtype, random);
  job->value = RandomTensor(request.value_bytes, request.dtype, random);
}

// Fills in the inputs of the job's operation, which is admitted. Results that are not written stay
// NaN.
inline void WriteInputs(AttendJob* job) {
  const auto copy = [](const std::vector<std::byte>& from, std::byte* to) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  };
  AttendOperation& operation = job->operation;
  copy(job->query, operation.tensors.query());
  copy(job->key, operation.tensors.key());
  copy(job->value, operation.tensors.value());
  const size_t output_bytes = operation.request.output_bytes();
  if (output_bytes > 0) std::memset(operation.tensors.output(), 0xff, output_bytes);
  const size_t lse_bytes = operation.request.lse_bytes();
  if (lse_bytes > 0) std::memset(operation.tensors.lse(), 0xff, lse_bytes);
}

// Admits the job's operation to an Engine or a Fleet, and fills in its inputs.
template <class Target>
absl::Status Prepare(AttendJob* job, Target* target) {
  absl::Status status = AdmitNow(target, &job->operation);
  if (status.ok()) WriteInputs(job);
  return status;
}

// The expected results. `resident`: the K/V of each span that names a sequence, [spans]; empty if
// none does.
inline kernels::AttentionResult Reference(const AttendJob& job,
                                          const std::vector<kernels::KvView>& resident = {}) {
  const AttendRequest& request = job.operation.request;
  std::vector<kernels::Span> spans;
  SpanCursor cursor(request, job.addresses());
  for (size_t i = 0; i < request.spans.size(); ++i, cursor.Advance()) {
    spans.push_back(InlineSpan(request, request.spans[i], cursor.tensors()));
    if (!request.spans[i].sequence_id.empty()) spans.back().kv = resident[i];
  }
  return kernels::ReferenceAttention(
      {request.geometry(), spans.data(), static_cast<int32_t>(spans.size())});
}

struct Tolerance {
  double output = 0;  // absolute, beyond the rounding to the dtype
  double lse = 0;     // absolute, beyond the rounding to float
};

inline Tolerance KernelTolerance(kernels::DType dtype) {
  return {dtype == kernels::DType::kFloat16 ? 2e-3 : 1.6e-2, 1e-4};
}

// The first place where the job's results differ from `want`; empty if there is none.
inline std::string FirstDifference(const AttendJob& job, const kernels::AttentionResult& want,
                                   const Tolerance& tolerance) {
  const AttendRequest& request = job.operation.request;
  const size_t heads = request.num_heads;
  const size_t dim = request.head_dim;
  const auto* output = reinterpret_cast<const uint16_t*>(job.operation.tensors.output());
  const float* lse = job.operation.tensors.lse();
  const auto differs = [](double got, double wanted, double allowed) {
    return got != wanted && !(std::abs(got - wanted) <= allowed);
  };
  const auto rounded = [&](double value) {
    return kernels::ToFloat(request.dtype,
                            kernels::FromFloat(request.dtype, static_cast<float>(value)));
  };
  size_t before = 0;  // rows of the spans before
  for (size_t span = 0; span < request.spans.size(); ++span) {
    const size_t rows = request.spans[span].query_rows;
    for (size_t i = 0; i < rows * heads; ++i) {
      const size_t row = i / heads, head = i % heads;
      const size_t in_span = request.layout == Layout::kNhd ? i : head * rows + row;
      const size_t got = before * heads + in_span;
      const size_t wanted = before * heads + i;
      const std::string where = absl::StrCat("span ", span, " row ", row, " head ", head);
      const auto wanted_lse = static_cast<float>(want.lse[wanted]);
      if (lse != nullptr && differs(lse[got], wanted_lse, tolerance.lse)) {
        return absl::StrCat(where, ": LSE ", lse[got], ", should be ", wanted_lse);
      }
      for (size_t d = 0; d < dim; ++d) {
        const float element = kernels::ToFloat(request.dtype, output[got * dim + d]);
        const float wanted_element = rounded(want.output[wanted * dim + d]);
        if (differs(element, wanted_element, tolerance.output)) {
          return absl::StrCat(where, " dim ", d, ": ", element, ", should be ", wanted_element);
        }
      }
    }
    before += rows;
  }
  return "";
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ENGINE_ATTEND_JOB_H_
