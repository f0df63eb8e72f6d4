// A client, a server with sequences, and bytes to load, for the tests of Sequence.
#ifndef FLASHCORE_TESTS_CLIENT_SEQUENCE_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_SEQUENCE_FIXTURE_H_

#include <memory>
#include <string>
#include <vector>

#include "flashcore/client.h"
#include "gtest/gtest.h"
#include "tests/client/fake_sequences.h"
#include "tests/client/fake_server.h"

namespace flashcore {

// 2 KV heads of 8 elements: rows of 32 bytes.
inline SequenceOptions SmallShape(uint32_t num_layers = 1) {
  SequenceOptions options;
  options.num_layers = num_layers;
  options.num_kv_heads = 2;
  options.head_dim = 8;
  return options;
}

// Different bytes for every row, and for K and V.
inline std::vector<std::byte> Bytes(size_t size, int seed) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 / 16 + i % 7 + seed);
  return bytes;
}

inline std::string Text(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class SequenceTest : public testing::Test {
 protected:
  SequenceTest() { sequences_.Install(&server_); }

  Sequence Create(const SequenceOptions& options = SmallShape()) {
    return client_->CreateSequence(options).value();
  }

  // Retries quickly.
  static ClientOptions Options() {
    ClientOptions options;
    options.retry.max_attempts = 3;
    options.retry.initial_backoff = options.retry.max_backoff = absl::Milliseconds(1);
    return options;
  }

  FakeSequences sequences_;
  FakeServer server_;
  std::unique_ptr<Client> client_ = *Client::Create(server_.target(), Options());
};

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_SEQUENCE_FIXTURE_H_
