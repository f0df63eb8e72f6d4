#include "client/cli/npy.h"

#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;

NpyArray Array(std::string descr, std::vector<uint64_t> shape) {
  NpyArray array{std::move(descr), std::move(shape), {}};
  size_t bytes = array.ElementBytes();
  for (const uint64_t size : array.shape) bytes *= size;
  array.data.resize(bytes);
  for (size_t i = 0; i < array.data.size(); ++i) array.data[i] = static_cast<std::byte>(i);
  return array;
}

// A file with this header and `data_bytes` of data.
std::string File(std::string header, size_t data_bytes, char version = 1) {
  header += "\n";
  std::string length(version == 1 ? 2 : 4, '\0');
  length[0] = static_cast<char>(header.size() & 0xff);
  length[1] = static_cast<char>(header.size() >> 8);
  return absl::StrCat(std::string("\x93NUMPY"), std::string{version, '\0'}, length, header,
                      std::string(data_bytes, 'x'));
}

TEST(NpyTest, RoundTrips) {
  for (const char* descr : {"<f2", "<f4", "<u2"}) {
    for (const std::vector<uint64_t>& shape :
         std::vector<std::vector<uint64_t>>{{}, {5}, {2, 3, 4}, {2, 0, 4}, {1, 2, 3, 8}}) {
      const NpyArray array = Array(descr, shape);
      const std::string bytes = SerializeNpy(array);
      EXPECT_EQ((bytes.size() - array.data.size()) % 64, 0u);
      const absl::StatusOr<NpyArray> back = ParseNpy("x", bytes);
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(back->descr, array.descr);
      EXPECT_EQ(back->shape, array.shape);
      EXPECT_EQ(back->data, array.data);
    }
  }
}

TEST(NpyTest, RoundTripsThroughAFile) {
  const std::string path = absl::StrCat(testing::TempDir(), "/npy_test.", getpid(), ".npy");
  const NpyArray array = Array("<f2", {4, 2, 8});
  ASSERT_EQ(WriteNpy(path, array), absl::OkStatus());
  EXPECT_EQ(ReadNpy(path)->data, array.data);
  const absl::Status missing = ReadNpy(path + ".none").status();
  EXPECT_TRUE(absl::IsNotFound(missing));
  EXPECT_THAT(missing.message(), HasSubstr(".none"));
  EXPECT_FALSE(WriteNpy("/no/such/folder/x.npy", array).ok());
}

TEST(NpyTest, ReadsWhatNumpyWrites) {
  // np.save of a float16 array of shape (2, 3), by NumPy 1.x, and version 2 of the same.
  const char header[] = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }   ";
  EXPECT_EQ(ParseNpy("x", File(header, 12))->shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(ParseNpy("x", File(header, 12, 2))->shape, (std::vector<uint64_t>{2, 3}));
  // Other writers order, quote and space it differently.
  EXPECT_TRUE(
      ParseNpy("x", File("{\"shape\":(6,),\"descr\":\"<f2\" , \"fortran_order\":False}", 12)).ok());
}

TEST(NpyTest, MalformedFilesAreNamedAndRejected) {
  const auto expect_error = [](const std::string& bytes, const char* problem) {
    const absl::Status status = ParseNpy("the_file", bytes).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << problem;
    EXPECT_THAT(status.message(), HasSubstr("the_file: "));
    EXPECT_THAT(status.message(), HasSubstr(problem));
  };
  const std::string good = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }";
  expect_error("", "magic");
  expect_error("PK\x03\x04", "magic");
  expect_error(File(good, 12, 3), "version");
  expect_error(File(good, 11), "does not fit the 11 bytes");
  expect_error(File(good, 13), "does not fit the 13 bytes");
  expect_error(File("{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }", 48), "'<f8'");
  expect_error(File("{'descr': '>f2', 'fortran_order': False, 'shape': (2, 3), }", 12), "'>f2'");
  expect_error(File("{'descr': '<f2', 'fortran_order': True, 'shape': (2, 3), }", 12), "Fortran");
  const char* bad_headers[] = {
      "",
      "{",
      "{}",
      "{'descr': '<f2', 'shape': (2, 3), }",
      "{'descr': '<f2', 'fortran_order': False, 'shape': (2, -3), }",
      "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3, }",
      "{'descr': '<f2', 'fortran_order': 0, 'shape': (2, 3), }",
      "{'descr': '<f2', 'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), }",
      "{'descr': [('a', '<f2')], 'fortran_order': False, 'shape': (2, 3), }",
      "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), 'more': 1}",
      "{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999999999999, 3), }",
      "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 3), } trailing"};
  for (const char* header : bad_headers) expect_error(File(header, 12), "header");
  // 2^62 * 4 elements wrap around to nothing.
  expect_error(
      File("{'descr': '<f2', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", 0),
      "does not fit");
  const std::string whole = File(good, 12);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseNpy("x", whole.substr(0, size)).ok()) << size;
  }
}

}  // namespace
}  // namespace flashcore::cli
