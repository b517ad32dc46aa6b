"""The manifests for Kubernetes and the image: valid by their schemas, and they agree with the engine and each other."""

import copy
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from bus import config as configuration
from bus.config import Config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.37"
SET_SCHEMA = json.loads((Path(__file__).parent / "leaderworkerset.schema.json").read_text())
MANIFESTS = {
    manifest["kind"]: manifest for manifest in yaml.safe_load_all((DEPLOY / "rankbus.yaml").read_text()) if manifest
}


def _templates(worker_set: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a set: the leader's, then the workers'."""
    template = worker_set["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def check(manifest: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError if a manifest is not valid."""
    if manifest["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    jsonschema.validate(manifest, SET_SCHEMA)
    for template in _templates(manifest):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "NetworkPolicy", "LeaderWorkerSet"])
def test_the_manifests_are_valid(kind: str) -> None:
    check(MANIFESTS[kind])


def _spec(worker_set: dict[str, Any]) -> Any:
    return worker_set["spec"]["leaderWorkerTemplate"]


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a policy that is not there": ("LeaderWorkerSet", lambda m: _spec(m).update(restartPolicy="Always")),
    "a misspelt field of the set": ("LeaderWorkerSet", lambda m: _spec(m).update(sizes=4)),
    "a misspelt field of a pod": ("LeaderWorkerSet", lambda m: _templates(m)[1]["spec"].update(nodeselector={})),
    "a number for text": ("LeaderWorkerSet", lambda m: _templates(m)[0]["spec"]["containers"][0].update(image=1)),
    "a container without a name": ("LeaderWorkerSet", lambda m: _templates(m)[0]["spec"]["containers"][0].pop("name")),
    "a port that is no number": ("Service", lambda m: m["spec"]["ports"][0].update(port="http")),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    kind, spoil = WRONG[what]
    manifest = copy.deepcopy(MANIFESTS[kind])
    spoil(manifest)
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(MANIFESTS["ConfigMap"]["data"]["config.toml"])
    return configuration.load({}, {}, file)


def test_the_pods_are_what_the_configuration_says(config: Config) -> None:
    manifest = MANIFESTS["LeaderWorkerSet"]
    name = manifest["metadata"]["name"]
    assert config.executors == manifest["spec"]["leaderWorkerTemplate"]["size"]
    assert manifest["spec"]["replicas"] == 1
    leader, worker = (template["spec"]["containers"][0] for template in _templates(manifest))
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert config.coordinator == f"{name}-0.{name}:{ports['coordinator']}"  # the leader's pod, by the set's own service
    assert config.follower_address == f"tcp://{name}-0.{name}:{ports['followers']}"
    assert (config.host, config.port) == ("0.0.0.0", ports["http"])
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert leader["args"] == ["rankbus", "serve"]
    assert worker["args"] == ["python", "-m", "executor", "--index", "$(LWS_WORKER_INDEX)"]


def test_the_mesh_has_all_chips_of_the_slice(config: Config) -> None:
    chips = set()
    for template in _templates(MANIFESTS["LeaderWorkerSet"]):
        topology = template["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["limits"]["google.com/tpu"] == resources["requests"]["google.com/tpu"]
        chips.add((topology, config.executors * int(resources["limits"]["google.com/tpu"])))
    ((topology, held),) = chips
    width, height = map(int, topology.split("x"))
    assert width * height == held == config.tensor_parallel * (config.data_shards or 0)
    assert config.ranks % (config.data_shards or 0) == 0


def test_what_the_configuration_names_is_mounted(config: Config) -> None:
    for template in _templates(MANIFESTS["LeaderWorkerSet"]):
        container = template["spec"]["containers"][0]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in mounts.values()} == volumes
        read = [config.model, config.curve_key_file, container["env"][0]["value"]]
        assert container["env"][0]["name"] == "RANKBUS_CONFIG"
        for path in (*read, config.cache_dir, config.run_dir):
            (mount,) = [mounts[folder] for folder in mounts if Path(path).is_relative_to(folder)]
            assert mount.get("readOnly", False) == (path in read), path


def test_only_the_pods_themselves_reach_more_than_the_http_port() -> None:
    policy = MANIFESTS["NetworkPolicy"]["spec"]
    among_us, from_anywhere = policy["ingress"]
    assert policy["podSelector"] == among_us["from"][0]["podSelector"]
    assert from_anywhere == {"ports": [{"port": "http"}]}
    for template in _templates(MANIFESTS["LeaderWorkerSet"]):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_image_is_made_of_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {
        container["image"]
        for template in _templates(MANIFESTS["LeaderWorkerSet"])
        for container in template["spec"]["containers"]
    }
    assert images == {f"rankbus:{version}"}
    assert f"-t rankbus:{version} " in text
    copied = {source for line in re.findall(r"^COPY (.*)$", text, re.M) for source in line.split()[:-1]}
    assert {"bus", "executor", "frontend", "ranks", "pyproject.toml", "supervisord.conf"} < copied
    kept = {line.removeprefix("!") for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()}
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in kept, f"the .dockerignore file leaves {source} out"
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.M)[0])
    assert command[:2] == ["rankbus", "serve"]
    assert configuration.split_flags(command[2:])[1] == []
