"""A project of a user: compiles the C++ of the READMEs against the client library alone."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(sys.argv.pop())  # in the build folder, so that what it compiled before is found

PROJECT = f"""cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
add_subdirectory({ROOT} flashcore)
add_executable(consumer main.cc)
target_compile_options(consumer PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror)
target_link_libraries(consumer PRIVATE flashcore_client)
"""

PROGRAM = """#include "client/cpp/client.h"

// What the text around the code says.
void Attend(absl::Span<const std::byte> q, absl::Span<const std::byte> k,
            absl::Span<const std::byte> v, absl::Span<std::byte> o) {
%s  status.IgnoreError();
}

void Step(absl::Span<const std::byte> prompt_k, absl::Span<const std::byte> prompt_v,
          uint64_t prompt_rows, absl::Span<const std::byte> q, absl::Span<const std::byte> k,
          absl::Span<const std::byte> v, absl::Span<std::byte> o) {
%s  beam->id();
  status.IgnoreError();
}

int main(int argc, char**) {
  if (argc == 1) return 0;  // the rest needs a server
  Attend({}, {}, {}, {});
  Step({}, {}, 0, {}, {}, {}, {});
}
"""


class ConsumerTest(unittest.TestCase):
    def run_in_folder(self, *command):
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-4000:])
        return done.stdout

    def test_the_readmes_code_compiles_without_a_warning(self):
        code = tuple(re.search(r"```cpp\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL).group(1)
                     for path in (ROOT / "client" / "README.md", ROOT / "README.md"))
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "CMakeLists.txt").write_text(PROJECT, encoding="utf-8")
        (FOLDER / "main.cc").write_text(PROGRAM % code, encoding="utf-8")
        said = self.run_in_folder("cmake", "-G", "Ninja", "-B", "build", "-DCMAKE_BUILD_TYPE=Release")
        self.assertIn("Building the client libraries alone", said)
        self.run_in_folder("cmake", "--build", "build", "--target", "consumer")
        self.run_in_folder("build/consumer")


if __name__ == "__main__":
    unittest.main()
