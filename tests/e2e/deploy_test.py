"""Checks the Dockerfile and the compose file against each other, the sources, the server and the
files that they mount. tests/docker.sh builds and runs the image."""

import json
import pathlib
import re
import subprocess
import unittest

import yaml

import harness

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CMAKE = (ROOT / "CMakeLists.txt").read_text()
VERSION = re.search(r"project\(flashcore VERSION (\S+)", CMAKE).group(1)


def read_yaml(path):
    return yaml.safe_load(path.read_text())


SERVICES = read_yaml(DEPLOY / "docker-compose.yml")["services"]


def with_defaults(text):
    """`text` as compose reads it with no environment variables set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(service):
    """{path in the container: path on the host} of a service's bind mounts."""
    volumes = (volume.split(":") for volume in service.get("volumes", ()))
    return {volume[1]: DEPLOY / volume[0] for volume in volumes if volume[0].startswith(".")}


def server_flags():
    """{name: default} of the server's flags."""
    usage = subprocess.run([harness.SERVER, "--help"], check=True, capture_output=True, text=True)
    return dict(re.findall(r"^ +--(\w+)=(.*)", usage.stdout, re.MULTILINE))


class DockerfileTest(unittest.TestCase):
    def test_the_sources_that_it_builds_are_let_in(self):
        allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
        for path in allowed:
            self.assertTrue((ROOT / path).exists(), path)
        needed = set(re.findall(r"^add_subdirectory\((\w+)\)", CMAKE, re.MULTILINE))
        needed |= set(re.findall(r"deploy/\w+\.sh", DOCKERFILE))
        self.assertIn("deploy/image_root.sh", needed)
        self.assertLessEqual(needed, set(allowed))

    def test_the_image_is_of_this_version(self):
        self.assertIn(f'image.version="{VERSION}"', DOCKERFILE)
        self.assertEqual(SERVICES["flashcore"]["image"], f"flashcore:{VERSION}")

    def test_the_health_check_tells_a_server_from_none(self):
        command = json.loads(re.search(r"HEALTHCHECK [^[]*\\\s*CMD (\[.*\])", DOCKERFILE).group(1))
        self.assertEqual(command[0], "/usr/bin/flashcore")
        with harness.Server() as server:
            target = f"--target={server.target}"
            self.assertEqual(harness.cli(*command[1:], target).stdout, "SERVING\n")
        done = harness.cli(*command[1:], target, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn("UNAVAILABLE", done.stderr)


class ComposeTest(unittest.TestCase):
    @harness.stress
    def test_compose_takes_it(self):
        # Debian's docker-compose, 1.29, does not know the project's name.
        text = (DEPLOY / "docker-compose.yml").read_text().replace("\nname: flashcore\n", "\n")
        done = subprocess.run(
            ["docker-compose", "--project-directory", DEPLOY, "-f", "-", "config", "--quiet"],
            input=text, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_images_have_a_version_and_come_back_after_a_reboot(self):
        for name, service in SERVICES.items():
            self.assertRegex(service["image"], r":v?\d+\.\d+\.\d+", name)
            self.assertEqual(service["restart"], "unless-stopped", name)

    def test_only_this_machine_reaches_the_ports(self):
        for name, service in SERVICES.items():
            for port in service.get("ports", ()):
                self.assertTrue(with_defaults(port).startswith("127.0.0.1:"), (name, port))

    def test_the_server_is_confined_has_a_gpu_and_time_to_drain(self):
        server = SERVICES["flashcore"]
        self.assertTrue(server["read_only"])
        self.assertEqual(server["cap_drop"], ["ALL"])
        for name in ("flashcore", "dcgm-exporter"):
            device, = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
            self.assertEqual((device["driver"], device["capabilities"]), ("nvidia", ["gpu"]))
        build = server["build"]
        self.assertRegex(DOCKERFILE, rf"AS {build['target']}\n")
        for name, value in build["args"].items():
            self.assertIn(f"ARG {name}={with_defaults(value)}\n", DOCKERFILE)
        flags = server_flags()
        for argument in server["command"]:
            self.assertIn(argument.removeprefix("--").partition("=")[0], flags)
        self.assertGreater(int(server["stop_grace_period"].removesuffix("s")),
                           float(flags["drain_timeout_s"]))

    def test_prometheus_and_grafana_find_their_files_and_each_other(self):
        prometheus, grafana = SERVICES["prometheus"], SERVICES["grafana"]
        for service in (prometheus, grafana):
            for path in mounts(service).values():
                self.assertTrue(path.is_dir(), path)
        config = next(argument.partition("=")[2] for argument in prometheus["command"]
                      if argument.startswith("--config.file="))
        config = mounts(prometheus)["/etc/prometheus"] / pathlib.Path(config).name
        for job in read_yaml(config)["scrape_configs"]:
            target, = job["static_configs"][0]["targets"]
            self.assertIn(target.partition(":")[0], SERVICES)
        provisioning = mounts(grafana)["/etc/grafana/provisioning"]
        source, = read_yaml(provisioning / "datasources/prometheus.yml")["datasources"]
        self.assertEqual(source["url"], "http://prometheus:9090")
        provider, = read_yaml(provisioning / "dashboards/flashcore.yml")["providers"]
        dashboards = mounts(grafana)[provider["options"]["path"]]
        self.assertGreaterEqual(len(list(dashboards.glob("*.json"))), 4)


if __name__ == "__main__":
    harness.main()
