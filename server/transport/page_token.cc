#include "server/transport/page_token.h"

#include <sys/random.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kHexDigits = 16;  // of 64 bits

uint64_t RotateLeft(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

void SipRounds(std::array<uint64_t, 4>* state, int rounds) {
  auto& [v0, v1, v2, v3] = *state;
  for (int i = 0; i < rounds; ++i) {
    v0 += v1;
    v2 += v3;
    v1 = RotateLeft(v1, 13) ^ v0;
    v3 = RotateLeft(v3, 16) ^ v2;
    v0 = RotateLeft(v0, 32) + v3;
    v2 += v1;
    v3 = RotateLeft(v3, 21) ^ v0;
    v1 = RotateLeft(v1, 17) ^ v2;
    v2 = RotateLeft(v2, 32);
  }
}

std::string Hex(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

}  // namespace

uint64_t SipHash(const SipHashKey& key, absl::string_view data) {
  std::array<uint64_t, 4> state = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
                                   key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573};
  const auto add = [&](uint64_t word) {
    state[3] ^= word;
    SipRounds(&state, 2);
    state[0] ^= word;
  };
  uint64_t last = uint64_t{data.size()} << 56;
  for (; data.size() >= sizeof(uint64_t); data.remove_prefix(sizeof(uint64_t))) {
    uint64_t word = 0;
    std::memcpy(&word, data.data(), sizeof(word));
    add(word);
  }
  for (size_t i = 0; i < data.size(); ++i) {
    last |= uint64_t{static_cast<unsigned char>(data[i])} << (8 * i);
  }
  add(last);
  state[2] ^= 0xff;
  SipRounds(&state, 4);
  return state[0] ^ state[1] ^ state[2] ^ state[3];
}

PageTokens::PageTokens() {
  // getrandom never returns fewer than 16 bytes; without a random key nothing is secret.
  if (getrandom(key_.data(), sizeof(key_), 0) != sizeof(key_)) std::abort();
}

uint64_t PageTokens::Tag(absl::string_view client, uint64_t position) const {
  return SipHash(key_, absl::StrCat(Hex(position), client));
}

std::string PageTokens::Make(absl::string_view client, uint64_t position) const {
  return Hex(position) + Hex(Tag(client, position));
}

std::optional<uint64_t> PageTokens::Parse(absl::string_view client, absl::string_view token) const {
  if (token.size() != 2 * kHexDigits) return std::nullopt;
  uint64_t position = 0;
  if (!absl::SimpleHexAtoi(token.substr(0, kHexDigits), &position)) return std::nullopt;
  if (token != Make(client, position)) return std::nullopt;
  return position;
}

}  // namespace flashcore::server
