"""Danger: a chart whose shards and front ends do not find each other, take commands that do not exist, or let strangers in."""

from __future__ import annotations

import base64
import ssl
from typing import Any

import kubernetes_validate
import pytest
import typer

from helm_chart import CHART, Manifest, container, environment, helm, needed, one, rendered
from monolith.cli.serve import serve_models
from monolith.cli.serve_shard import serve_shard
from monolith.serve.shards.addresses import parse_shards

SERVE: dict[str, Any] = {
    "shards": 3,
    "replicas": 2,
    "frontEnds": 4,
    "export": "/model/exported_models/7",
    "partial": True,
}
VALUES = {
    "beside training": {"serve": SERVE},
    "alone": {"serve": SERVE, "ps": {"replicas": 0}, "workers": {"replicas": 0}},
}


def parsed(verb: Any, arguments: list[str]) -> dict[str, Any]:  # noqa: ANN401 - a function with options
    app = typer.Typer()
    app.command()(verb)
    context = typer.main.get_command(app).make_context("verb", list(arguments), resilient_parsing=False)
    return dict(context.params)


def shards_of(manifests: list[Manifest]) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == "StatefulSet" and "-shard-" in m["metadata"]["name"]]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_knows_every_field(values: str, version: str) -> None:
    run = helm("lint", "--strict", str(CHART), values=needed(VALUES[values]))
    assert run.returncode == 0, run.stdout
    manifests = rendered(VALUES[values])
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert len(shards_of(manifests)) == 3
    jobs = {"Job"} if values == "beside training" else set()
    assert {m["kind"] for m in manifests} & {"Job"} == jobs


def test_nothing_is_served_unless_asked_for() -> None:
    assert not shards_of(rendered())
    assert not [m for m in rendered() if m["kind"] == "Deployment"]


def test_front_ends_ask_the_names_that_shards_have() -> None:
    manifests = rendered(VALUES["alone"])
    shards = shards_of(manifests)
    given = parsed(serve_models, container(one(manifests, "Deployment"))["args"])
    expected = tuple(
        tuple(
            f"{shard['metadata']['name']}-{replica}.{shard['spec']['serviceName']}.ads.svc.cluster.local:7200"
            for replica in range(shard["spec"]["replicas"])
        )
        for shard in shards
    )
    assert parse_shards(given["shards"]) == expected
    assert given["partial"] is True
    assert one(manifests, "Deployment")["spec"]["replicas"] == 4
    for number, shard in enumerate(shards):
        options = parsed(serve_shard, container(shard)["args"])
        assert (options["shard"], options["shards"], options["port"]) == (number, 3, 7200)
        assert str(options["export"]) == str(given["paths"][0]) == "/model/exported_models/7"
        assert environment(shard, 0, {"token": "secret"})["MONOLITH_PS_TOKEN"] == "secret"
    certificate = base64.b64decode(one(manifests, "Secret", "-tls")["data"]["tls.crt"]).decode()
    names = ssl.PEM_cert_to_DER_cert(certificate)
    assert b"*.clicks-monolith-shard.ads.svc.cluster.local" in names
    assert b"clicks-monolith-front-end.ads.svc.cluster.local" in names


def test_only_front_ends_reach_shards() -> None:
    manifests = rendered(VALUES["alone"])
    policy = one(manifests, "NetworkPolicy", "-shard")["spec"]
    front_end = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for shard in shards_of(manifests):
        labels = shard["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        budget = one(manifests, "PodDisruptionBudget", shard["metadata"]["name"])["spec"]["selector"]["matchLabels"]
        meant = [
            other
            for other in shards_of(manifests)
            if budget.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert meant == [shard], "each shard has a budget of its own"
    (allowed,) = policy["ingress"][0]["from"]
    assert allowed["podSelector"]["matchLabels"].items() <= front_end.items()


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_pods_have_no_rights_they_do_not_need(kind: str) -> None:
    for manifest in (m for m in rendered(VALUES["alone"]) if m["kind"] == kind):
        assert container(manifest)["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["name"]: mount for mount in container(manifest)["volumeMounts"]}
        assert mounts["model"]["readOnly"] is True


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"serve": {"shards": -1}}, "serve.shards"),
        ({"serve": {"replicas": 0}}, "serve.replicas"),
        ({"serve": {"shard": 2}}, "Additional property shard is not allowed"),
        ({"workers": {"command": []}}, "workers.command"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], complaint: str) -> None:
    run = helm("template", "clicks", str(CHART), values=needed(values))
    assert run.returncode != 0
    assert complaint in run.stderr
