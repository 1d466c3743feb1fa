"""Danger: a chart that Kubernetes refuses, whose pods do not find their role, or that lets strangers in."""

from __future__ import annotations

import base64
import copy
import json
import ssl
from typing import Any

import kubernetes_validate
import pytest

from helm_chart import CHART, NEEDED, Manifest, container, environment, expanded, helm, needed, one, rendered
from monolith.train.distributed.config import RunnerConfig
from monolith.transport.tokens import reveal

EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "modelDir": {"existingClaim": "models", "path": "/data/model"},
    "ps": {
        "replicas": 3,
        "memoryLimit": "6GiB",
        "logFlushSecs": 0,
        "extraArgs": ["--max-streams=512"],
        "resources": {"limits": {"memory": "8Gi"}},
        "podDisruptionBudget": {"maxUnavailable": "25%"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "workers": {"replicas": 4, "command": ["python", "-m", "train"], "nodeSelector": {"gpu": "no"}},
    "token": {"existingSecret": "ps-token"},
    "tls": {"existingSecret": "ps-tls"},
    "env": {"MONOLITH_SLOW_START_STEPS": 100, "OMP_NUM_THREADS": "1"},
    "networkPolicy": {"enabled": False},
}
RANKS: dict[str, Any] = {"ps": {"replicas": 0}, "workers": {"replicas": 3, "minRanks": 2}}
VALUES = {"needed": {}, "everything": EVERYTHING, "ranks": RANKS}
VERSIONS = ("1.29", "1.37")


@pytest.fixture(scope="module")
def plain() -> list[Manifest]:
    return rendered()


@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_nothing_wrong(values: str) -> None:
    run = helm("lint", "--strict", str(CHART), values=needed(VALUES[values]))
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(values: str, version: str) -> None:
    manifests = rendered(VALUES[values])
    servers = set() if values == "ranks" else {"StatefulSet", "PodDisruptionBudget"}
    assert {"Job", "Service"} | servers <= {m["kind"] for m in manifests}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validation_would_notice(plain: list[Manifest]) -> None:
    servers = copy.deepcopy(one(plain, "StatefulSet"))
    servers["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(servers, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workers": NEEDED["workers"]}, "image.repository"),
        ({"image": NEEDED["image"]}, "workers.command"),
        (needed({"ps": {"replicas": -1}}), "ps.replicas"),
        (needed({"workers": {"minRanks": -1}}), "workers.minRanks"),
        (needed({"ps": {"memoryLimit": "much"}}), "ps.memoryLimit"),
        (needed({"ps": {"replica": 2}}), "Additional property replica is not allowed"),
        (needed({"modelDir": {"path": "model"}}), "modelDir.path"),
        (needed({"env": {"NO-NAME": "x"}}), "env"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], complaint: str) -> None:
    run = helm("template", "clicks", str(CHART), values=values)
    assert run.returncode != 0
    assert complaint in run.stderr


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_every_pod_finds_its_role(kind: str) -> None:
    manifests = rendered({"ps": {"replicas": 2}, "workers": {"replicas": 3}})
    pods = one(manifests, kind)
    count = 2 if kind == "StatefulSet" else 3
    for index in range(count):
        runner = RunnerConfig.from_env(environment(pods, index, {"token": "a token of the job"}))
        assert (runner.server_type, runner.index) == ("ps" if kind == "StatefulSet" else "worker", index)
        assert (runner.num_ps, runner.num_workers, runner.is_local) == (2, 3, False)
        assert (runner.model_dir, runner.uuid) == ("/model", "ads-clicks-2")
        assert runner.recovers
        assert reveal(runner.client.token) == reveal(runner.server.token) == "a token of the job"
        assert str(runner.client.tls_root_certs) == "/etc/monolith/tls/ca.crt"
        runner.require_spread()


def test_without_servers_the_workers_are_ranks() -> None:
    manifests = rendered(RANKS)
    assert not {"StatefulSet", "PodDisruptionBudget"} & {m["kind"] for m in manifests}
    ranks = one(manifests, "Job")
    for index in range(3):
        runner = RunnerConfig.from_env(environment(ranks, index, {"token": "a token of the job"}))
        assert (runner.server_type, runner.index, runner.num_workers) == ("worker", index, 3)
        assert runner.enable_full_sync_training
        assert runner.server.host == f"clicks-monolith-worker-{index}.clicks-monolith-worker.ads.svc.cluster.local"
        assert str(runner.server.tls_key) == "/etc/monolith/tls/tls.key"
        assert runner.min_ranks == 2
    (volume,) = (v for v in ranks["spec"]["template"]["spec"]["volumes"] if v["name"] == "tls")
    assert "items" not in volume["secret"], "a rank listens, and needs the key"
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    assert "ports" not in policy["ingress"][0], "a rank takes any free port"
    certificate = base64.b64decode(one(manifests, "Secret", "-tls")["data"]["tls.crt"]).decode()
    assert b"*.clicks-monolith-worker.ads.svc.cluster.local" in ssl.PEM_cert_to_DER_cert(certificate)


def test_addresses_are_the_names_that_pods_have(plain: list[Manifest]) -> None:
    servers = one(plain, "StatefulSet")
    service, name = servers["spec"]["serviceName"], servers["metadata"]["name"]
    cluster = json.loads(environment(servers, 0, {"token": ""})["TF_CONFIG"])["cluster"]
    assert cluster["ps"] == [f"{name}-{i}.{service}.ads.svc.cluster.local:7100" for i in range(2)]
    assert one(plain, "Service", "-ps")["metadata"]["name"] == service
    workers = one(plain, "Job")
    subdomain = workers["spec"]["template"]["spec"]["subdomain"]
    assert cluster["worker"] == [f"{workers['metadata']['name']}-0.{subdomain}.ads.svc.cluster.local:7100"]
    assert one(plain, "Service", "-worker")["metadata"]["name"] == subdomain
    for role in ("-ps", "-worker"):
        assert one(plain, "Service", role)["spec"]["clusterIP"] == "None"


def test_a_server_keeps_what_it_holds_below_the_run(plain: list[Manifest]) -> None:
    servers = one(plain, "StatefulSet")
    variables = environment(servers, 1, {"token": ""})
    arguments = [expanded(argument, variables) for argument in container(servers)["args"]]
    assert "--folder=/model/ps/1" in arguments
    claim = {v["name"]: v for v in servers["spec"]["template"]["spec"]["volumes"]}["model"]["persistentVolumeClaim"]
    kept = one(plain, "PersistentVolumeClaim")
    assert claim["claimName"] == kept["metadata"]["name"]
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert kept["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_server_loses_nothing_that_it_has_acknowledged_unless_told_otherwise(plain: list[Manifest]) -> None:
    assert "--log-flush-secs=0" in container(one(plain, "StatefulSet"))["args"]
    loose = rendered({"ps": {"logFlushSecs": "off"}})
    assert "--log-flush-secs=off" in container(one(loose, "StatefulSet"))["args"]


def test_selectors_meet_the_pods_they_mean_and_no_others(plain: list[Manifest]) -> None:
    other = rendered(release="views")
    servers = one(plain, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    strangers = [
        one(plain, "Job")["spec"]["template"]["metadata"]["labels"],
        one(other, "StatefulSet")["spec"]["template"]["metadata"]["labels"],
    ]
    selectors = [
        one(plain, "StatefulSet")["spec"]["selector"]["matchLabels"],
        one(plain, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(plain, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        one(plain, "Service", "-ps")["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= servers.items()
        assert not any(selector.items() <= labels.items() for labels in strangers)
    (allowed,) = one(plain, "NetworkPolicy")["spec"]["ingress"][0]["from"]
    meant = allowed["podSelector"]["matchLabels"].items()
    assert meant <= servers.items()
    assert [meant <= labels.items() for labels in strangers] == [True, False]


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_pods_have_no_rights_they_do_not_need(plain: list[Manifest], kind: str) -> None:
    pod = one(plain, kind)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container(one(plain, kind))["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    keys = {v["name"]: v for v in pod["volumes"]}["tls"]["secret"].get("items")
    assert keys == ([{"key": "ca.crt", "path": "ca.crt"}] if kind == "Job" else None)


def test_secrets_are_made_once_and_not_beside_those_that_exist(plain: list[Manifest]) -> None:
    token = base64.b64decode(one(plain, "Secret", "-token")["data"]["token"]).decode()
    assert len(token) == 40
    assert token not in json.dumps([m for m in plain if m["kind"] != "Secret"])
    assert set(one(plain, "Secret", "-tls")["data"]) == {"tls.crt", "tls.key", "ca.crt"}
    everything = rendered(EVERYTHING)
    assert not {"Secret", "PersistentVolumeClaim", "NetworkPolicy"} & {m["kind"] for m in everything}
    assert '"ps-token"' in json.dumps(everything)
    assert '"ps-tls"' in json.dumps(everything)


def test_a_long_name_of_a_release_leaves_names_that_dns_takes() -> None:
    manifests = rendered({"ps": {"replicas": 1}}, release="a" * 53)
    names = [m["metadata"]["name"] for m in manifests]
    assert max(map(len, names)) <= 63 - len("-1234")
