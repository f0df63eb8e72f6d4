"""tests/bench/record_server.py --quick on real servers. A second flashcore-server is the peer."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import harness

SCRIPT = pathlib.Path(__file__).parents[1] / "bench" / "record_server.py"
# Takes the peer's flags, and leaves out those that flashcore-server has not.
PEER = f"""#!/bin/bash
for flag; do
  case $flag in --workers=* | --backend=* | --capacity=*) ;; *) set -- "$@" "$flag" ;; esac
  shift
done
exec {harness.SERVER} --metrics_listen=127.0.0.1:0 --log_format=json \\
  --kv_memory_bytes={256 * harness.MIB} "$@"
"""


@harness.stress
class RecordServerTest(unittest.TestCase):
    def record(self, *flags):
        """(exit status, record) of a short run."""
        with harness.in_temporary_folder() as folder:
            peer = folder / "peer"
            peer.write_text(PEER)
            peer.chmod(0o755)
            done = subprocess.run(
                [sys.executable, "-B", SCRIPT, "--quick", f"--device={harness.DEVICE}",
                 f"--server={harness.SERVER}", f"--cli={harness.CLI}", f"--peer_command={peer}",
                 f"--json={folder}/record.json", *flags],
                capture_output=True, text=True, timeout=500, env=os.environ)
            print(done.stdout[-3000:], done.stderr[-2000:])
            return done.returncode, json.loads((folder / "record.json").read_text())

    def test_every_section(self):
        status, record = self.record("--sections=peer,transports,tuning,cpu")
        self.assertEqual((status, record["failures"], record["left_out"]), (0, [], []))
        rows = record["rows"]
        self.assertEqual({row["section"] for row in rows}, {"peer", "transports", "tuning", "cpu"})
        for row in rows:
            self.assertEqual(row["rounds"], 2, row)
            self.assertGreater(row["samples"], 0, row)
            self.assertLessEqual(row["p50_us_min"], row["p50_us"], row)
            self.assertLessEqual(row["p50_us"], row["p50_us_max"], row)
            self.assertEqual(row["variant"] != row["baseline"], "p50_over_baseline" in row, row)
        self.check_labels(record)
        self.check_echoes(rows)

    def check_labels(self, record):
        servers = record["servers"]
        self.assertEqual(set(servers), {"flashcore", "peer", "peer_2_processes"})
        self.assertEqual(len(servers["peer_2_processes"]["targets"]), 2)
        of_peer = [row for row in record["rows"] if row["section"] == "peer"]
        for row in of_peer:
            self.assertEqual(row["target"], ",".join(servers[row["variant"]]["targets"]))
        # Two processes need two clients.
        self.assertEqual({row["clients"] for row in of_peer if row["variant"] == "peer_2_processes"},
                         {2})

    def check_echoes(self, rows):
        streams = set()
        for row in (row for row in rows if "echo_p50_us" in row):
            streams.add((row["transport"], row["stream"]))
            self.assertGreater(row["outside_kernel_over_echo"], 0)
        self.assertEqual(streams, {(transport, stream) for transport in ("tcp", "unix")
                                   for stream in (False, True)})

    def test_what_fails_is_in_the_record_and_the_exit_status(self):
        status, record = self.record("--sections=peer", "--peer_command=/bin/false")
        self.assertEqual(status, 1)
        self.assertTrue(any("peer did not start" in text for text in record["failures"]), record)
        self.assertEqual({row["variant"] for row in record["rows"]}, {"flashcore"})


if __name__ == "__main__":
    harness.main()
