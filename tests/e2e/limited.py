"""Servers with limits of the process, and users of their own: RLIMIT_NPROC counts the threads of a user, and
only root can be another one."""

import json
import os
import sys
import tempfile

import harness

USER = 2_000_000_000 + os.getpid()  # nobody else's

# Runs argv[3:] as user argv[1] with the limits of argv[2]. It opens the program before it gives up the right
# to look into its folder.
LAUNCHER = """
import json, os, resource, sys
program = os.open(sys.argv[3], os.O_RDONLY)
for name, value in json.loads(sys.argv[2]).items():
    resource.setrlimit(getattr(resource, name), (value, value))
if int(sys.argv[1]):
    for argument in sys.argv:
        if argument.startswith("--listen=unix:"):
            os.chmod(os.path.dirname(argument.removeprefix("--listen=unix:")), 0o777)
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[1])])
    os.setresuid(*3 * [int(sys.argv[1])])
os.execve(program, sys.argv[3:], os.environ)
"""


class LimitedServer(harness.Server):
    """A server of a user of its own if `user`; `limits` are those of resource.setrlimit, by name."""

    def __init__(self, limits, *flags, user=0):
        with tempfile.NamedTemporaryFile("w", prefix="limited-", delete=False) as script:
            arguments = json.dumps([sys.executable, "-c", LAUNCHER, str(user), json.dumps(limits),
                                    harness.SERVER])
            script.write(f"#!{sys.executable}\nimport os, sys\n"
                         f"argv = {arguments} + sys.argv[1:]\nos.execv(argv[0], argv)\n")
        os.chmod(script.name, 0o755)
        try:
            super().__init__(*flags, program=script.name)
        finally:
            os.unlink(script.name)


def refusal(limits, *flags, user=0):
    """(exit status, output) of a server that does not start."""
    program = [sys.executable, "-c", LAUNCHER, str(user), json.dumps(limits), harness.SERVER]
    return harness.refusal("--metrics_listen=127.0.0.1:0", *harness.device_flags(), *flags, program=program)
