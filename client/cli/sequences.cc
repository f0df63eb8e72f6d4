// flashcore sequences: lists and deletes resident sequences.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cpp/encode.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(flashcore::cli::SequenceIds, delete, {},
          "delete these sequences instead of listing them: ids, separated by commas, or all (of "
          "this client, see --yes)");
ABSL_FLAG(bool, yes, false,
          "let --delete=all delete without asking. Without a terminal it must be set.");

namespace flashcore::cli {
namespace {

constexpr absl::Duration kRecent = absl::Minutes(1);

// "512", or "510..512" if the layers differ.
std::string Lengths(const v1::SequenceInfo& info) {
  if (info.layer_lengths().empty()) return "-";
  const auto [low, high] =
      std::minmax_element(info.layer_lengths().begin(), info.layer_lengths().end());
  return *low == *high ? absl::StrCat(*low) : absl::StrCat(*low, "..", *high);
}

// The clients that may read it besides its owner.
std::string SharedWith(const v1::SequenceInfo& info) {
  return info.shared() ? "all" : info.group().empty() ? "-" : info.group();
}

std::string ListTable(const std::vector<v1::SequenceInfo>& sequences) {
  std::string out =
      absl::StrFormat("%-32s %6s %8s %8s %-8s %-13s %12s %10s %10s %8s %9s %-6s %-8s %s\n", "id",
                      "layers", "kv_heads", "head_dim", "dtype", "kv_dtype", "length", "K/V MiB",
                      "pinned MiB", "idle s", "timeout s", "leased", "device", "shared");
  for (const v1::SequenceInfo& info : sequences) {
    absl::StrAppendFormat(
        &out, "%-32s %6d %8d %8d %-8s %-13s %12s %10.1f %10.1f %8.0f %9.0f %-6s %-8s %s\n",
        absl::BytesToHexString(info.sequence_id()), info.num_layers(), info.num_kv_heads(),
        info.head_dim(), AbslUnparseFlag(client::FromProto(info.dtype())),
        AbslUnparseFlag(client::FromProto(info.kv_dtype())), Lengths(info),
        static_cast<double>(info.kv_bytes()) / 0x1p20,
        static_cast<double>(info.pinned_bytes()) / 0x1p20, info.idle_seconds(),
        info.idle_timeout_seconds(), info.leased() ? "yes" : "-", info.device_id(),
        SharedWith(info));
  }
  return out;
}

nlohmann::ordered_json InfoJson(const v1::SequenceInfo& info) {
  return {{"id", absl::BytesToHexString(info.sequence_id())},
          {"num_kv_heads", info.num_kv_heads()},
          {"head_dim", info.head_dim()},
          {"dtype", AbslUnparseFlag(client::FromProto(info.dtype()))},
          {"kv_dtype", AbslUnparseFlag(client::FromProto(info.kv_dtype()))},
          {"layer_lengths", info.layer_lengths()},
          {"kv_bytes", info.kv_bytes()},
          {"pin", info.pin()},
          {"pinned_bytes", info.pinned_bytes()},
          {"idle_seconds", info.idle_seconds()},
          {"idle_timeout_seconds", info.idle_timeout_seconds()},
          {"leased", info.leased()},
          {"shared", info.shared()},
          {"group", info.group()},
          {"device", info.device_id()}};
}

int List(Client* client) {
  const absl::StatusOr<std::vector<v1::SequenceInfo>> sequences = client->ListSequences();
  if (!sequences.ok()) return Fail(sequences.status());
  auto json = nlohmann::ordered_json::array();
  for (const v1::SequenceInfo& info : *sequences) json.push_back(InfoJson(info));
  Print({{"sequences", json}}, ListTable(*sequences));
  return kExitOk;
}

// Shows what would be deleted, and asks. Whoever runs as the same user may be using it.
bool MayDelete(const std::vector<v1::SequenceInfo>& sequences) {
  const auto recent =
      std::count_if(sequences.begin(), sequences.end(), [](const v1::SequenceInfo& info) {
        return info.idle_seconds() < absl::ToDoubleSeconds(kRecent);
      });
  std::fprintf(stderr, "%sDelete %zu sequences, of which %td were used in the last minute? [y/N] ",
               ListTable(sequences).c_str(), sequences.size(), recent);
  std::string answer;
  std::getline(std::cin, answer);
  return absl::EqualsIgnoreCase(answer, "y") || absl::EqualsIgnoreCase(answer, "yes");
}

// Prints errors and continues.
int Delete(Client* client, const std::vector<std::string>& ids) {
  size_t deleted = 0;
  for (const std::string& id : ids) {
    const absl::StatusOr<Sequence> sequence = client->OpenSequence(id);
    const absl::Status status = sequence.ok() ? sequence->Delete() : sequence.status();
    if (status.ok()) {
      ++deleted;
    } else {
      std::fprintf(stderr, "flashcore: %s: %s\n", absl::BytesToHexString(id).c_str(),
                   status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str());
    }
  }
  Print({{"deleted", deleted}},
        absl::StrCat("deleted ", deleted, " of ", ids.size(), " sequences\n"));
  return deleted == ids.size() ? kExitOk : kExitFailure;
}

int DeleteAll(Client* client) {
  const bool ask = !absl::GetFlag(FLAGS_yes);
  if (ask && !isatty(STDIN_FILENO)) {
    return FailUsage(
        "--delete=all: also deletes the sequences of other programs of this client. Without a "
        "terminal to ask on, it needs --yes");
  }
  const absl::StatusOr<std::vector<v1::SequenceInfo>> sequences = client->ListSequences();
  if (!sequences.ok()) return Fail(sequences.status());
  if (ask && !sequences->empty() && !MayDelete(*sequences)) {
    std::fputs("flashcore: nothing is deleted\n", stderr);
    return kExitFailure;
  }
  std::vector<std::string> ids;
  for (const v1::SequenceInfo& info : *sequences) ids.push_back(info.sequence_id());
  return Delete(client, ids);
}

int RunSequences(Client* client) {
  const SequenceIds to_delete = absl::GetFlag(FLAGS_delete);
  if (to_delete.all) return DeleteAll(client);
  return to_delete.ids.empty() ? List(client) : Delete(client, to_delete.ids);
}

}  // namespace

Command SequencesCommand() {
  return {
      "sequences",
      "lists or deletes the resident sequences of this client",
      "Lists the sequences that this client has created or forked, oldest first. `length` is in "
      "rows: a range if the layers differ. `K/V MiB` counts a page that forks share in each of "
      "them. `timeout s`: the server deletes a sequence that is idle for so long; 0: never. "
      "`leased`: it deletes the sequence when the client that made it is gone. "
      "`shared`: who may read and fork it besides this client: all, or a group. Without tokens and "
      "certificates, all programs of one user on the server's host are one client; --delete=all "
      "lists what it would delete, and asks. Examples:\n\n"
      "  flashcore sequences\n"
      "  flashcore sequences --delete=all",
      {"delete", "yes"},
      RunSequences};
}

}  // namespace flashcore::cli
