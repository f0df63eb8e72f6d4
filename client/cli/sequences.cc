// flashcore sequences: lists and deletes resident sequences.
#include <algorithm>
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "client/cpp/encode.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(flashcore::cli::SequenceIds, delete, {},
          "delete these sequences instead of listing them: ids, separated by commas, or all (of "
          "this client)");

namespace flashcore::cli {
namespace {

// "512", or "510..512" if the layers differ.
std::string Lengths(const v1::SequenceInfo& info) {
  if (info.layer_lengths().empty()) return "-";
  const auto [low, high] =
      std::minmax_element(info.layer_lengths().begin(), info.layer_lengths().end());
  return *low == *high ? absl::StrCat(*low) : absl::StrCat(*low, "..", *high);
}

// Who may read it besides its owner.
std::string SharedWith(const v1::SequenceInfo& info) {
  return info.shared() ? "all" : info.group().empty() ? "-" : info.group();
}

std::string ListTable(const std::vector<v1::SequenceInfo>& sequences) {
  std::string out = absl::StrFormat("%-32s %6s %8s %8s %-8s %12s %10s %10s %8s %9s %-8s %s\n", "id",
                                    "layers", "kv_heads", "head_dim", "dtype", "length", "K/V MiB",
                                    "pinned MiB", "idle s", "timeout s", "device", "shared");
  for (const v1::SequenceInfo& info : sequences) {
    absl::StrAppendFormat(&out, "%-32s %6d %8d %8d %-8s %12s %10.1f %10.1f %8.0f %9.0f %-8s %s\n",
                          absl::BytesToHexString(info.sequence_id()), info.num_layers(),
                          info.num_kv_heads(), info.head_dim(),
                          AbslUnparseFlag(client::FromProto(info.dtype())), Lengths(info),
                          static_cast<double>(info.kv_bytes()) / 0x1p20,
                          static_cast<double>(info.pinned_bytes()) / 0x1p20, info.idle_seconds(),
                          info.idle_timeout_seconds(), info.device_id(), SharedWith(info));
  }
  return out;
}

nlohmann::ordered_json InfoJson(const v1::SequenceInfo& info) {
  return {{"id", absl::BytesToHexString(info.sequence_id())},
          {"num_kv_heads", info.num_kv_heads()},
          {"head_dim", info.head_dim()},
          {"dtype", AbslUnparseFlag(client::FromProto(info.dtype()))},
          {"layer_lengths", info.layer_lengths()},
          {"kv_bytes", info.kv_bytes()},
          {"pin", info.pin()},
          {"pinned_bytes", info.pinned_bytes()},
          {"idle_seconds", info.idle_seconds()},
          {"idle_timeout_seconds", info.idle_timeout_seconds()},
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

// Prints errors and continues.
int Delete(Client* client, SequenceIds what) {
  if (what.all) {
    const absl::StatusOr<std::vector<v1::SequenceInfo>> sequences = client->ListSequences();
    if (!sequences.ok()) return Fail(sequences.status());
    for (const v1::SequenceInfo& info : *sequences) what.ids.push_back(info.sequence_id());
  }
  size_t deleted = 0;
  for (const std::string& id : what.ids) {
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
        absl::StrCat("deleted ", deleted, " of ", what.ids.size(), " sequences\n"));
  return deleted == what.ids.size() ? kExitOk : kExitFailure;
}

int RunSequences(Client* client) {
  const SequenceIds to_delete = absl::GetFlag(FLAGS_delete);
  if (!to_delete.all && to_delete.ids.empty()) return List(client);
  return Delete(client, to_delete);
}

}  // namespace

Command SequencesCommand() {
  return {
      "sequences",
      "lists or deletes the resident sequences of this client",
      "Lists the sequences that this client has created or forked, oldest first. `length` is in "
      "rows: a range if the layers differ. `K/V MiB` counts a page that forks share in each of "
      "them. `timeout s`: the server deletes a sequence that is idle for so long; 0: never. "
      "`shared`: who may read and fork it besides this client: all, or a group. Examples:\n\n"
      "  flashcore sequences\n"
      "  flashcore sequences --delete=all",
      {"delete"},
      RunSequences};
}

}  // namespace flashcore::cli
