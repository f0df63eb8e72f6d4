// Reads and writes NumPy's .npy files, versions 1 and 2.
//
// Elements are float16 ('<f2'), float32 ('<f4') or the bits of bfloat16 ('<u2'), little-endian, in
// C order; everything else is refused. Errors are INVALID_ARGUMENT or NOT_FOUND and name the file
// and the problem.
#ifndef FLASHCORE_CLIENT_CLI_NPY_H_
#define FLASHCORE_CLIENT_CLI_NPY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace flashcore::cli {

struct NpyArray {
  std::string descr;            // "<f2", "<f4" or "<u2"
  std::vector<uint64_t> shape;  // empty: a scalar
  std::vector<std::byte> data;  // row-major; its size follows from descr and shape

  size_t ElementBytes() const { return descr == "<f4" ? 4 : 2; }
};

// `name` is the file's name in errors.
absl::StatusOr<NpyArray> ParseNpy(absl::string_view name, absl::string_view bytes);
std::string SerializeNpy(const NpyArray& array);  // version 1, header padded to 64 bytes

absl::StatusOr<NpyArray> ReadNpy(const std::string& path);
absl::Status WriteNpy(const std::string& path, const NpyArray& array);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_NPY_H_
