// flashcore attend: .npy files in, .npy files out.
#include <cstring>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cli/npy.h"
#include "kernels/half.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::string, query, "", "file with Q");
ABSL_FLAG(std::string, key, "", "file with K");
ABSL_FLAG(std::string, value, "", "file with V");
ABSL_FLAG(std::string, output, "", "file to write O to, in the shape and dtype of Q");
ABSL_FLAG(std::string, lse, "", "file to write the LSE to, float32; empty: none");
ABSL_FLAG(flashcore::Mask, mask, flashcore::Mask(),
          "none, causal, or window:LEFT,RIGHT in rows (empty, or 2^31 and more: no bound)");
ABSL_FLAG(std::optional<float>, softmax_scale, std::nullopt,
          "factor of Q.K^T; unset: 1 / sqrt(head_dim)");

namespace flashcore::cli {
namespace {

// Shape of one tensor: [rows, heads, dim] or [heads, rows, dim], with an optional batch in front.
struct Shape {
  uint32_t batch = 1;
  uint32_t rows = 0;
  uint32_t heads = 0;
  uint32_t dim = 0;
};

absl::Status Read(const std::string& path, Layout layout, NpyArray* array, Shape* shape) {
  absl::StatusOr<NpyArray> file = ReadNpy(path);
  if (!file.ok()) return file.status();
  *array = *std::move(file);
  std::vector<uint64_t> sizes = array->shape;
  if (sizes.size() == 3) sizes.insert(sizes.begin(), 1);
  bool fits = sizes.size() == 4;
  for (const uint64_t size : sizes) fits = fits && size <= INT32_MAX;
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": shape (", absl::StrJoin(array->shape, ", "), "); want 3 axes, ",
                     AbslUnparseFlag(layout), ", or 4 with a leading batch"));
  }
  const bool nhd = layout == Layout::kNHD;
  shape->batch = static_cast<uint32_t>(sizes[0]);
  shape->rows = static_cast<uint32_t>(sizes[nhd ? 1 : 2]);
  shape->heads = static_cast<uint32_t>(sizes[nhd ? 2 : 1]);
  shape->dim = static_cast<uint32_t>(sizes[3]);
  return absl::OkStatus();
}

kernels::DType ToKernel(DType dtype) {
  return dtype == DType::kFloat16 ? kernels::DType::kFloat16 : kernels::DType::kBFloat16;
}

// Converts a float32 array to `dtype`; leaves other arrays alone.
void Narrow(DType dtype, NpyArray* array) {
  if (array->descr != "<f4") return;
  const size_t elements = array->data.size() / 4;
  std::vector<std::byte> narrow(elements * 2);
  for (size_t i = 0; i < elements; ++i) {
    float wide = 0;
    std::memcpy(&wide, &array->data[i * 4], 4);
    const uint16_t bits = kernels::FromFloat(ToKernel(dtype), wide);
    std::memcpy(&narrow[i * 2], &bits, 2);
  }
  array->data = std::move(narrow);
}

std::vector<std::byte> Widen(DType dtype, const std::vector<std::byte>& narrow) {
  std::vector<std::byte> wide(narrow.size() * 2);
  for (size_t i = 0; i < narrow.size() / 2; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, &narrow[i * 2], 2);
    const float value = kernels::ToFloat(ToKernel(dtype), bits);
    std::memcpy(&wide[i * 4], &value, 4);
  }
  return wide;
}

struct Inputs {
  NpyArray query, key, value;  // as read, but float32 data is converted to `dtype`
  Shape query_shape, kv_shape;
  DType dtype = DType::kFloat16;
};

absl::Status CheckShapes(const Inputs& inputs) {
  const Shape& q = inputs.query_shape;
  const Shape& kv = inputs.kv_shape;
  if (inputs.key.shape != inputs.value.shape) {
    return absl::InvalidArgumentError(
        absl::StrCat("key has shape (", absl::StrJoin(inputs.key.shape, ", "), ") and value (",
                     absl::StrJoin(inputs.value.shape, ", "), "); want the same"));
  }
  if (inputs.query.descr != inputs.key.descr || inputs.query.descr != inputs.value.descr) {
    return absl::InvalidArgumentError(
        absl::StrCat("query, key and value have dtypes '", inputs.query.descr, "', '",
                     inputs.key.descr, "' and '", inputs.value.descr, "'; want the same"));
  }
  if (q.batch != kv.batch || q.dim != kv.dim) {
    return absl::InvalidArgumentError(absl::StrCat("query has batch ", q.batch, " and dim ", q.dim,
                                                   ", key has batch ", kv.batch, " and dim ",
                                                   kv.dim, "; want the same"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Inputs> ReadInputs(Layout layout) {
  Inputs inputs;
  const std::string path = absl::GetFlag(FLAGS_query);
  Shape value_shape;  // that of the key: CheckShapes compares the arrays
  absl::Status status = Read(path, layout, &inputs.query, &inputs.query_shape);
  if (status.ok()) status = Read(absl::GetFlag(FLAGS_key), layout, &inputs.key, &inputs.kv_shape);
  if (status.ok()) status = Read(absl::GetFlag(FLAGS_value), layout, &inputs.value, &value_shape);
  if (status.ok()) status = CheckShapes(inputs);
  if (!status.ok()) return status;
  inputs.dtype = absl::GetFlag(FLAGS_dtype);
  if (inputs.query.descr == "<f2" && inputs.dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": holds float16, but --dtype=bfloat16"));
  }
  if (inputs.query.descr == "<u2" && inputs.dtype != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": '<u2' stands for the bits of bfloat16 and needs --dtype=bfloat16"));
  }
  for (NpyArray* array : {&inputs.query, &inputs.key, &inputs.value}) Narrow(inputs.dtype, array);
  return inputs;
}

AttendRequest MakeRequest(const Inputs& inputs, Layout layout) {
  AttendRequest request;
  request.spans.assign(inputs.query_shape.batch, {inputs.query_shape.rows, inputs.kv_shape.rows});
  request.dtype = inputs.dtype;
  request.num_heads = inputs.query_shape.heads;
  request.num_kv_heads = inputs.kv_shape.heads;
  request.head_dim = inputs.query_shape.dim;
  request.layout = layout;
  request.mask = absl::GetFlag(FLAGS_mask);
  request.softmax_scale = absl::GetFlag(FLAGS_softmax_scale);
  request.query = inputs.query.data;
  request.key = inputs.key.data;
  request.value = inputs.value.data;
  return request;
}

absl::Status WriteResults(const Inputs& inputs, std::vector<std::byte> output,
                          const std::vector<float>& lse) {
  NpyArray array{inputs.query.descr, inputs.query.shape, std::move(output)};
  if (array.descr == "<f4") array.data = Widen(inputs.dtype, array.data);
  absl::Status status = WriteNpy(absl::GetFlag(FLAGS_output), array);
  if (!status.ok() || lse.empty()) return status;
  array.descr = "<f4";
  array.shape.pop_back();
  array.data.resize(lse.size() * sizeof(float));
  std::memcpy(array.data.data(), lse.data(), array.data.size());
  return WriteNpy(absl::GetFlag(FLAGS_lse), array);
}

int RunAttend(Client* client) {
  for (const auto* flag : {&FLAGS_query, &FLAGS_key, &FLAGS_value, &FLAGS_output}) {
    if (absl::GetFlag(*flag).empty()) {
      return FailUsage(
          absl::StrCat("attend needs --", absl::GetFlagReflectionHandle(*flag).Name()));
    }
  }
  const Layout layout = absl::GetFlag(FLAGS_layout);
  const absl::StatusOr<Inputs> inputs = ReadInputs(layout);
  if (!inputs.ok()) return Fail(inputs.status());
  AttendRequest request = MakeRequest(*inputs, layout);
  std::vector<std::byte> output(inputs->query.data.size());
  std::vector<float> lse(absl::GetFlag(FLAGS_lse).empty() ? 0 : request.LseElements());
  request.output = absl::MakeSpan(output);
  request.lse = absl::MakeSpan(lse);
  AttendResult result;
  absl::Status status = client->Attend(request, &result);
  if (status.ok()) status = WriteResults(*inputs, std::move(output), lse);
  if (!status.ok()) return Fail(status);
  const Timing& timing = result.timing;
  Print({{"output", absl::GetFlag(FLAGS_output)},
         {"receive_ns", timing.receive_ns},
         {"staging_wait_ns", timing.staging_wait_ns},
         {"queue_ns", timing.queue_ns},
         {"copy_in_ns", timing.copy_in_ns},
         {"kernel_ns", timing.kernel_ns},
         {"copy_out_ns", timing.copy_out_ns}},
        absl::StrFormat("wrote %s (%s); kernel %.1f us\n", absl::GetFlag(FLAGS_output),
                        absl::StrJoin(inputs->query.shape, "x"), timing.kernel_ns / 1e3));
  return kExitOk;
}

}  // namespace

Command AttendCommand() {
  return {
      "attend",
      "computes attention over Q, K and V from .npy files",
      "Usage: flashcore attend --query q.npy --key k.npy --value v.npy --output o.npy\n\n"
      "Q, K and V are [rows, heads, head_dim] (--layout=NHD) or [heads, rows, head_dim] (HND). K "
      "and V have their own number of rows and heads. A fourth axis in front is a batch: each "
      "entry is a span. Elements are '<f2' (float16), '<u2' (bits of bfloat16, with "
      "--dtype=bfloat16), or '<f4', which is converted to --dtype and back. O has the shape and "
      "dtype of Q.",
      {"query", "key", "value", "output", "lse", "layout", "mask", "softmax_scale", "dtype"},
      RunAttend};
}

}  // namespace flashcore::cli
