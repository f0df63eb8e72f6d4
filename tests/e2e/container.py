"""Control groups with limits, as a container has, for servers of tests. Needs root and cgroups that can be
written; `why_none()` says what is missing."""

import contextlib
import os
import pathlib
import shlex
import stat

import harness

ROOT = pathlib.Path("/sys/fs/cgroup")
PERIOD_US = 100_000


def _own_folder(controller):
    """Where the group of this process is, of version 1 with `controller`, or of version 2; None: nowhere."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        mount = ROOT / controller if controller in controllers.split(",") else ROOT
        if controllers in ("", controller) or mount != ROOT:
            if controllers == "" and not (ROOT / "cgroup.controllers").exists():
                continue
            folder = mount / group.lstrip("/")
            return folder if folder.exists() else mount
    return None


def _limits(memory, pids, cpus):
    """[(controller, {file of version 1: value}, {file of version 2: value})] of what is limited."""
    found = []
    if memory is not None:
        found.append(("memory", {"memory.limit_in_bytes": memory}, {"memory.max": memory}))
    if pids is not None:
        found.append(("pids", {"pids.max": pids}, {"pids.max": pids}))
    if cpus is not None:
        quota = int(cpus * PERIOD_US)
        found.append(("cpu", {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota},
                      {"cpu.max": f"{quota} {PERIOD_US}"}))
    return found


class Container:
    """Groups with these limits: bytes, threads, seconds of CPU time a second. None: no limit. `program` is a
    harness.Server's, which then runs in them. Use as a context manager; OSError if they cannot be made."""

    def __init__(self, memory=None, pids=None, cpus=None):
        self._limits = _limits(memory, pids, cpus)
        self.folders = {}  # by controller; version 2 has one for all
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            name = f"flashcore_test.{os.getpid()}"
            for controller, version_1, version_2 in self._limits:
                parent = _own_folder(controller)
                if parent is None:
                    raise OSError(f"no cgroup has the controller {controller}")
                folder = parent / name
                if folder not in self.folders.values():
                    folder.mkdir()
                    stack.callback(self._remove, folder)
                self.folders[controller] = folder
                is_version_1 = (folder / next(iter(version_1))).exists()
                for file, value in (version_1 if is_version_1 else version_2).items():
                    (folder / file).write_text(str(value))
            folder = stack.enter_context(harness.in_temporary_folder())
            self.program = str(folder / "server")
            joins = "\n".join(f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}"
                              for group in set(self.folders.values()))
            pathlib.Path(self.program).write_text(f'#!/bin/sh\n{joins}\nexec {harness.SERVER} "$@"\n')
            os.chmod(self.program, stat.S_IRWXU)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    @staticmethod
    def _remove(folder):
        """Once the last process has left it."""
        def removed():
            with contextlib.suppress(OSError):
                folder.rmdir()
            return not folder.exists()
        harness.wait_until(removed, f"{folder} is removed")

    def peak_bytes(self):
        """The most memory that its processes had at a time."""
        for file in ("memory.max_usage_in_bytes", "memory.peak"):
            if (path := self.folders["memory"] / file).exists():
                return int(path.read_text())
        return 0


def why_none(memory=None, pids=None, cpus=None):
    """Why no Container with these limits can be made here; empty if one can."""
    try:
        with Container(memory, pids, cpus):
            return ""
    except OSError as error:
        return str(error)
