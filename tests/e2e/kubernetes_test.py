"""Checks the manifests of deploy/kubernetes against each other, the server and Prometheus. It does not
test what needs a cluster: API schemas, and whether pods start."""

import json
import pathlib
import re
import shutil
import subprocess
import unittest

import yaml

import harness

KUBERNETES = pathlib.Path(__file__).parents[2] / "deploy" / "kubernetes"
FOLDERS = ("base", "monitoring", "autoscaling")
WORKLOADS = ("StatefulSet", "Deployment")
PREFIXES = r"\b(?:flashcore|grpc_server)_[a-z0-9_]+"


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def read(folder):
    """(the kustomization, its resources) from the files."""
    kustomization, = documents(KUBERNETES / folder / "kustomization.yaml")
    resources = [document for name in kustomization["resources"]
                 for document in documents(KUBERNETES / folder / name)]
    return kustomization, resources


def flag(args, name):
    value, = (arg.split("=", 1)[1] for arg in args if arg.startswith(f"--{name}="))
    return value


class KubernetesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kustomizations, cls.all = {}, []
        for folder in FOLDERS:
            cls.kustomizations[folder], resources = read(folder)
            cls.all += resources
        cls.workloads = [r for r in cls.all if r["kind"] in WORKLOADS]
        cls.pods = [w["spec"]["template"] for w in cls.workloads]
        cls.server = cls.get("StatefulSet", "flashcore-server")
        cls.container = cls.server["spec"]["template"]["spec"]["containers"][0]

    @classmethod
    def get(cls, kind, name):
        found, = (r for r in cls.all if (r["kind"], r["metadata"]["name"]) == (kind, name))
        return found

    def selected(self, labels):
        """The only pod template with these labels."""
        pods = [p for p in self.pods if labels.items() <= p["metadata"]["labels"].items()]
        self.assertEqual(len(pods), 1, labels)
        return pods[0]

    def ports(self, pod):
        """{name: number} of its container."""
        container, = pod["spec"]["containers"]
        return {p["name"]: p["containerPort"] for p in container["ports"]}

    @harness.stress
    def test_kustomize_builds_every_folder(self):
        if shutil.which("kubectl") is None:
            self.skipTest("needs kubectl")
        for folder in FOLDERS:
            built = subprocess.run(["kubectl", "kustomize", KUBERNETES / folder], check=True,
                                   capture_output=True, text=True).stdout
            want = [(r["kind"], r["metadata"]["name"]) for r in read(folder)[1]]
            got = [(r["kind"], r["metadata"]["name"]) for r in yaml.safe_load_all(built)]
            generated = [("ConfigMap", name) for kind, name in got if kind == "ConfigMap"]
            self.assertCountEqual(got, want + generated)
            self.assertEqual(len(generated),
                             len(self.kustomizations[folder].get("configMapGenerator", [])))

    def test_names_are_unique_and_files_listed(self):
        names = [(r["kind"], r["metadata"]["name"]) for r in self.all]
        self.assertEqual(len(names), len(set(names)))
        for folder, kustomization in self.kustomizations.items():
            used = {"kustomization.yaml", *kustomization["resources"]}
            for generator in kustomization.get("configMapGenerator", []):
                used |= {file.split("=")[-1] for file in generator["files"]}
            self.assertEqual(used, {path.name for path in (KUBERNETES / folder).iterdir()})

    def test_selectors_find_their_pods_and_ports(self):
        for workload in self.workloads:
            labels = workload["spec"]["selector"]["matchLabels"]
            self.assertIs(self.selected(labels), workload["spec"]["template"])
            for spread in workload["spec"]["template"]["spec"]["topologySpreadConstraints"]:
                self.assertEqual(spread["labelSelector"]["matchLabels"], labels)
        for service in (r for r in self.all if r["kind"] == "Service"):
            ports = self.ports(self.selected(service["spec"]["selector"]))
            for port in service["spec"]["ports"]:
                self.assertEqual(ports[port["targetPort"]], port["port"])
        for budget in (r for r in self.all if r["kind"] == "PodDisruptionBudget"):
            self.selected(budget["spec"]["selector"]["matchLabels"])
        for policy in (r for r in self.all if r["kind"] == "NetworkPolicy"):
            own = self.selected(policy["spec"]["podSelector"]["matchLabels"])
            for rule in policy["spec"]["ingress"]:
                for port in rule["ports"]:
                    self.assertIn(port["port"], self.ports(own))
            for peer in (p for rules in ("from", "to")
                         for rule in policy["spec"]["ingress"] + policy["spec"].get("egress", [])
                         for p in rule.get(rules, []) if "namespaceSelector" not in p):
                self.selected(peer["podSelector"]["matchLabels"])
        monitor = self.get("ServiceMonitor", "flashcore-server")["spec"]
        service, = (r for r in self.all if r["kind"] == "Service" and monitor["selector"][
            "matchLabels"].items() <= r["metadata"].get("labels", {}).items())
        self.assertIn(monitor["endpoints"][0]["port"], {p["name"] for p in service["spec"]["ports"]})
        self.assertEqual(service["metadata"]["labels"][monitor["jobLabel"]], "flashcore")
        monitor = self.get("PodMonitor", "flashcore-envoy")["spec"]
        self.assertIn(monitor["podMetricsEndpoints"][0]["port"],
                      self.ports(self.selected(monitor["selector"]["matchLabels"])))

    def test_pods_are_confined_and_their_config_exists(self):
        generated = {g["name"] for k in self.kustomizations.values()
                     for g in k.get("configMapGenerator", [])}
        for pod in self.pods:
            spec, (container,) = pod["spec"], pod["spec"]["containers"]
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertEqual(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            self.assertFalse(spec["automountServiceAccountToken"])
            self.assertFalse(spec["enableServiceLinks"])
            self.assertEqual(container["securityContext"], {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]}})
            volumes = {v["name"]: v for v in spec.get("volumes", [])}
            for mount in container.get("volumeMounts", []):
                self.assertIn(volumes[mount["name"]]["configMap"]["name"], generated)
        for resources in ("requests", "limits"):
            self.assertEqual(self.container["resources"][resources]["nvidia.com/gpu"], 1)

    def test_probes_and_grace_fit_the_server(self):
        args, ports = self.container["args"], self.ports(self.server["spec"]["template"])
        self.assertEqual(flag(args, "listen"), f"0.0.0.0:{ports['grpc']}")
        self.assertEqual(flag(args, "metrics_listen"), f"0.0.0.0:{ports['metrics']}")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            self.assertEqual(self.container[probe]["grpc"]["port"], ports["grpc"])
        spec = self.server["spec"]["template"]["spec"]
        sleep = self.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        self.assertGreaterEqual(spec["terminationGracePeriodSeconds"],
                                sleep + float(flag(args, "drain_timeout_s")) + 5)

    def test_envoy_knows_every_pod(self):
        config, = documents(KUBERNETES / "base" / "envoy-config.yaml")
        resources = config["static_resources"]
        listeners = {x["name"]: x["address"]["socket_address"]["port_value"]
                     for x in resources["listeners"]}
        envoy = self.get("Deployment", "flashcore-envoy")["spec"]["template"]
        self.assertEqual(listeners, self.ports(envoy))
        pool, = (c for c in resources["clusters"] if c["name"] == "flashcore")
        endpoints = [e["endpoint"]["address"]["socket_address"]
                     for e in pool["load_assignment"]["endpoints"][0]["lb_endpoints"]]
        service = self.server["spec"]["serviceName"]
        self.assertEqual(self.get("Service", service)["spec"]["clusterIP"], "None")
        replicas = self.get("ScaledObject", "flashcore-server")["spec"]["maxReplicaCount"]
        port = self.ports(self.server["spec"]["template"])["grpc"]
        name = self.server["metadata"]["name"]
        self.assertEqual(endpoints, [{"address": f"{name}-{i}.{service}", "port_value": port}
                                     for i in range(replicas)])
        self.assertEqual(pool["lb_policy"], "RING_HASH")
        hashing = pool["common_lb_config"]["consistent_hashing_lb_config"]
        self.assertTrue(hashing["use_hostname_for_hashing"])
        self.assertEqual(set(re.findall(r"header_name: (\S+)}", (
            KUBERNETES / "base" / "envoy-config.yaml").read_text())), {"x-flashcore-sequence"})

    def test_the_server_takes_its_flags_and_has_the_metrics(self):
        ours = ("--listen", "--metrics_listen", "--device")
        args = [a for a in self.container["args"] if not a.startswith(ours)]
        scaled = self.get("ScaledObject", "flashcore-server")["spec"]
        self.assertEqual(scaled["scaleTargetRef"]["name"], self.server["metadata"]["name"])
        with harness.Server(*args, "--kv_memory_bytes=67108864") as server:
            text = server.metrics_text()
        for trigger in scaled["triggers"]:
            query = trigger["metadata"]["query"]
            names = set(re.findall(PREFIXES, query))
            self.assertTrue(names)
            for name in names:
                self.assertIn(f"\n{name}{{", text)
            with harness.in_temporary_folder() as folder:
                rule = {"record": "x", "expr": query}
                (folder / "rules.yml").write_text(
                    json.dumps({"groups": [{"name": "x", "rules": [rule]}]}))
                checked = subprocess.run(["promtool", "check", "rules", folder / "rules.yml"],
                                         capture_output=True, text=True)
                self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_rules_and_dashboards_are_packaged_whole(self):
        with harness.in_temporary_folder() as folder:
            files = {"prometheus/alerts.yml": "# Why.\ngroups:\n  - name: a\n    rules: []\n",
                     "prometheus/alerts_test.yml": "groups:\n  - name: b\n",
                     "prometheus/prometheus.yml": "global: {}\n",
                     "grafana/dashboards/service.json": '{"title": "{{rpc}}"}\n'}
            script = folder / "kubernetes" / "observability.py"
            for name in (*files, "kubernetes/observability.py"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(KUBERNETES / "observability.py", script)
            self.assertNotEqual(subprocess.run([script], capture_output=True).returncode, 0)
            for name, text in files.items():
                (folder / name).write_text(text)
            printed = subprocess.run([script], check=True, capture_output=True).stdout
        rule, dashboard = yaml.safe_load_all(printed)
        self.assertEqual((rule["kind"], rule["metadata"]["name"], rule["spec"]),
                         ("PrometheusRule", "flashcore-alerts",
                          {"groups": [{"name": "a", "rules": []}]}))
        self.assertEqual((dashboard["kind"], dashboard["data"]),
                         ("ConfigMap", {"service.json": files["grafana/dashboards/service.json"]}))


if __name__ == "__main__":
    harness.main()
