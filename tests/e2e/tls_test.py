"""TLS and client certificates: who gets in, and what the server starts with."""

import contextlib
import subprocess

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from certificates import DAY
from credentials import CredentialsTest, client_flags, tls_channel, tls_flags

Code = grpc.StatusCode


class TlsTest(CredentialsTest):
    def test_the_client_checks_the_servers_certificate(self):
        cases = {
            "good": (self.pair, None),
            "expired": (self.ca.issue("server", begin=-2 * DAY, end=-DAY),
                        "(?i)certificate.*(expired|verify failed)"),
            "not yet valid": (self.ca.issue("server", begin=DAY, end=2 * DAY),
                              "(?i)certificate.*(not yet valid|verify failed)"),
            "wrong CA": (self.other_ca.issue("server"), "(?i)certificate.*verify failed"),
            "wrong host": (self.ca.issue("server", san="DNS:elsewhere.example"),
                           "(?i)hostname verification"),
        }
        with contextlib.ExitStack() as stack:
            servers = {name: stack.enter_context(harness.Server(*tls_flags(pair)))
                       for name, (pair, _) in cases.items()}
            commands = {name: (harness.CLI, "info", f"--target={server.target}",
                               *client_flags(self.ca)) for name, server in servers.items()}
            commands["its name"] = (*commands["wrong host"], "--tls_server_name=elsewhere.example")
            ends = dict(zip(commands, harness.run_together(commands.values())))
            for name in ("good", "its name"):
                self.assertEqual(ends[name].returncode, 0, ends[name].stderr)
            for name, (_, error) in cases.items():
                with self.subTest(name), tls_channel(servers[name], self.ca) as channel:
                    info = harness.stub(channel).GetServerInfo
                    if error is None:
                        info(pb.GetServerInfoRequest())
                    else:
                        self.assert_failed(error, ends[name])
                        self.assert_code(Code.UNAVAILABLE, info, pb.GetServerInfoRequest())

    def test_the_server_checks_the_clients_certificate(self):
        bad = {
            "none": None,
            "expired": self.ca.issue("client", begin=-2 * DAY, end=-DAY),
            "not yet valid": self.ca.issue("client", begin=DAY, end=2 * DAY),
            "wrong CA": self.other_ca.issue("client"),
        }
        good = self.ca.issue("client", san=None)
        with harness.Server(*tls_flags(self.pair, self.ca)) as server:
            tcp, unix = (f"--target={server.target}", f"--target=unix:{server.socket}")
            *refused, by_tcp, by_unix = harness.run_together(
                (harness.CLI, "info", target, *client_flags(self.ca, pair))
                for target, pair in (*((tcp, pair) for pair in bad.values()), (tcp, good),
                                     (unix, None)))
            for (name, pair), done in zip(bad.items(), refused):
                with self.subTest(name), tls_channel(server, self.ca, pair) as channel:
                    self.assert_failed("UNAVAILABLE", done)
                    self.assert_code(Code.UNAVAILABLE, harness.stub(channel).GetServerInfo,
                                     pb.GetServerInfoRequest())
            for done in (by_tcp, by_unix):
                self.assertEqual(done.returncode, 0, done.stderr)
            with tls_channel(server, self.ca, good) as channel:
                harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest())

    def test_plaintext_and_tls_do_not_mix(self):
        with harness.Server(*tls_flags(self.pair)) as with_tls, harness.Server() as plain:
            flags = client_flags(self.ca)
            *mixed, tls_to_tls, plain_to_plain = harness.run_together(
                (harness.CLI, "info", f"--target={server.target}", *flags)
                for server, flags in ((with_tls, []), (plain, flags), (with_tls, flags),
                                      (plain, [])))
            for done in mixed:
                self.assert_failed("UNAVAILABLE.*(?s:.)*TLS", done)
            for done in (tls_to_tls, plain_to_plain):
                self.assertEqual(done.returncode, 0, done.stderr)
            with with_tls.channel() as channel:
                self.assert_code(Code.UNAVAILABLE, harness.stub(channel).GetServerInfo,
                                 pb.GetServerInfoRequest())

    def test_only_tls_from_1_2_on(self):
        with harness.Server(*tls_flags(self.pair)) as server:
            for version, works in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
                done = subprocess.run(
                    ["openssl", "s_client", "-connect", server.target, version, "-alpn", "h2",
                     "-CAfile", self.ca.file, "-cipher", "ALL:@SECLEVEL=0"],
                    input=b"", capture_output=True, timeout=harness.PATIENCE)
                got = b"ALPN protocol: h2" in done.stdout and b"Verification: OK" in done.stdout
                self.assertEqual(got, works, (version, done.stdout[-1000:], done.stderr[-1000:]))

    def test_start_needs_files_that_fit(self):
        certificate, key = self.pair
        other_key = self.ca.issue("other")[1]
        missing, garbage = self.folder / "missing", self.folder / "garbage"
        garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        ok = tls_flags(self.pair)
        cases = [
            (1, f"{missing}: No such file", tls_flags((missing, key))),
            (1, f"{missing}: No such file", tls_flags((certificate, missing))),
            (1, f"{garbage}: no certificate in PEM", tls_flags((garbage, key))),
            (1, f"{certificate}: no private key", tls_flags((certificate, certificate))),
            (1, f"{other_key}: not the key of the first certificate in {certificate}",
             tls_flags((certificate, other_key))),
            (1, f"{key}: no certificate in PEM", [*ok, f"--tls_client_ca_file={key}"]),
            (1, f"{self.folder}: ", [f"--token_file={self.folder}"]),
            (1, f"{certificate}: line 1: want NAME:SHA256:GROUPS", [f"--token_file={certificate}"]),
            (2, "--insecure_listen", ["--listen=0.0.0.0:0"]),
            (2, "--insecure_listen", ["--listen=unix:/tmp/x,[::]:0"]),
            (2, "--insecure_listen", ["--listen=example.com:0"]),
            (2, "--tls_key_file", [f"--tls_cert_file={certificate}"]),
            (2, "--tls_client_ca_file", [f"--tls_client_ca_file={certificate}"]),
            (2, "--trusted_proxies: 'envoy'", ["--trusted_proxies=envoy"]),
        ]
        ends = harness.run_together(
            [harness.SERVER, "--device=cpu", "--metrics_listen=",
             *([] if flags[0].startswith("--listen") else ["--listen=127.0.0.1:0"]), *flags]
            for _, _, flags in cases)
        for (status, error, flags), done in zip(cases, ends):
            self.assertEqual(done.returncode, status, (flags, done.stderr))
            self.assertIn(error, done.stderr)

    def test_no_credential_flag_fails_open(self):
        empty = self.folder / "empty"
        empty.touch()
        names = ("token_file", "metrics_token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
        ok = dict(zip(names[2:], (*self.pair, self.ca.file)))

        def start(**files):
            return [harness.SERVER, "--device=cpu", "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
                    *(f"--{name}={file}" for name, file in files.items())]

        # A secret that is mounted before it is filled; an unset variable, as in --token_file=$TOKENS.
        cases = [(1, f"--{name}: {file}: it is ", start(**{**(ok if "tls" in name else {}), name: file}), {})
                 for name in names for file in (empty, "/dev/null")]
        cases += [(2, f"--{name}: '' is not the path of a file", start(**{**ok, name: ""}), {})
                  for name in names]
        cases += [(2, f"variable FLASHCORE_{name.upper()}: '' is not the path of a file", start(),
                   {f"FLASHCORE_{name.upper()}": ""}) for name in names]
        cases.append((2, "usable without --metrics_listen",
                      [*start(metrics_token_file=self.pair[0]), "--metrics_listen="], {}))
        ends = harness.run_together(["env", *(f"{key}={value}" for key, value in env.items()), *command]
                                    for _, _, command, env in cases)
        for (status, error, command, env), done in zip(cases, ends):
            self.assertEqual(done.returncode, status, (command, env, done.stderr))
            self.assertIn(error, done.stderr)

    def test_every_address_may_be_served_with_tls_or_when_told_so(self):
        for flags in (tls_flags(self.pair), ["--insecure_listen"]):
            with harness.Server("--listen=0.0.0.0:0", *flags) as server:
                self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
