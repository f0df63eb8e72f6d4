// What each client holds: its sequences, and the bytes of the pages that they took.
#ifndef FLASHCORE_SERVER_KV_CLIENT_ACCOUNTS_H_
#define FLASHCORE_SERVER_KV_CLIENT_ACCOUNTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

struct Sequence;

// A page is paid for by the client whose sequence took it, as long as anybody shares it. Not
// thread-safe: the SequenceStore guards it.
class ClientAccounts {
 public:
  struct Account {
    std::string name;
    size_t kv_bytes = 0;
    std::map<uint64_t, std::shared_ptr<Sequence>> sequences;  // by serial number
  };

  // The number of the client's account, opened if there is none; it is valid until the account
  // holds nothing and CloseIfEmpty is called.
  uint32_t Open(absl::string_view name);
  const Account* Find(absl::string_view name) const;  // null: it holds nothing
  Account& operator[](uint32_t number) { return *accounts_[number]; }
  const Account& operator[](uint32_t number) const { return *accounts_[number]; }
  void CloseIfEmpty(uint32_t number);

 private:
  absl::flat_hash_map<std::string, uint32_t> by_name_;
  std::vector<std::unique_ptr<Account>> accounts_;  // null: the number is free
  std::vector<uint32_t> free_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_CLIENT_ACCOUNTS_H_
