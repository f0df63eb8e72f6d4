"""The command `flashcore`: `flashcore serve` runs the server, all else the command line of the same name."""

import os
import pathlib
import signal
import sys

BIN = pathlib.Path(__file__).resolve().parent / "bin"
SERVE_HELP = "flashcore serve [--flag=value]...: runs the server; its flags: flashcore serve --help\n"


def main() -> None:
    """Replaces this process, so that signals and the exit status are the program's."""
    arguments = sys.argv[1:]
    program = BIN / "flashcore"
    if arguments[:1] == ["serve"]:
        program = BIN / "flashcore-server"
        del arguments[0]
    elif not arguments:
        print(SERVE_HELP, file=sys.stderr, flush=True)
    elif arguments[0] in ("--help", "-h", "help"):
        print(SERVE_HELP, flush=True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program would inherit that
    try:
        os.execv(program, [str(program), *arguments])
    except OSError as error:
        sys.exit(f"flashcore: cannot run {program}: {error.strerror}")


if __name__ == "__main__":
    main()
