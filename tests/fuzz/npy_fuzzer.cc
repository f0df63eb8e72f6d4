// Gives bytes to the reader of .npy files. An accepted file is consistent, and reads back the same
// when it is written again.
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "client/cli/npy.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using cli::NpyArray;

void CheckInput(const std::string& bytes) {
  const absl::StatusOr<NpyArray> array = cli::ParseNpy("file", bytes);
  if (!array.ok()) {
    Require(absl::StartsWith(array.status().message(), "file: "), "an error without the file");
    return;
  }
  Require(array->descr == "<f2" || array->descr == "<f4" || array->descr == "<u2", "descr");
  unsigned __int128 want = array->ElementBytes();
  for (const uint64_t size : array->shape) {
    want *= size;
    Require(want <= SIZE_MAX, "a size that overflows");
  }
  Require(array->data.size() == want, "data that do not fit the shape");
  Require(absl::EndsWith(bytes, absl::string_view(reinterpret_cast<const char*>(array->data.data()),
                                                  array->data.size())),
          "other data than those at the end of the file");

  const std::string written = cli::SerializeNpy(*array);
  Require((written.size() - array->data.size()) % 64 == 0, "data that are not aligned");
  const absl::StatusOr<NpyArray> again = cli::ParseNpy("file", written);
  Require(again.ok() && again->descr == array->descr && again->shape == array->shape &&
              again->data == array->data,
          "it does not read back");
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashcore::fuzz::CheckInput(std::string(data, data + size));
  return 0;
}
