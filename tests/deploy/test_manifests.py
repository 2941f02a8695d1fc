"""Image, compose file, kustomize base and units: what their linters say, and what is never in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from minishuffle.cli.systemd import WATCHDOG_TIMEOUTS
from minishuffle.config import ClusterSettings

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
SECRET = re.compile(r"\b[0-9a-f]{32,}\b|password\s*[:=]\s*\S", re.IGNORECASE)


def succeeds(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=["kubernetes", "kubernetes-tls"])
def objects(deploy: Path, tmp_path: Path, request: pytest.FixtureRequest) -> list[Any]:
    """The kustomize base with a secret, and what gives it TLS with a CA: as kustomize renders it if that is
    there, else its resources, with patches put into them."""
    base = shutil.copytree(deploy / "kubernetes", tmp_path / "kubernetes")
    over = shutil.copytree(deploy / "kubernetes-tls", tmp_path / "kubernetes-tls")
    for path in (base / "secret", over / "ca.pem", over / "ca-key.pem"):
        path.write_text("x")
    if shutil.which("kubectl"):
        rendered = succeeds("kubectl", "kustomize", tmp_path / request.param)
    else:
        resources = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
        found = [each for name in resources for each in yaml.safe_load_all((base / name).read_text())]
        if request.param == "kubernetes-tls":
            patches = yaml.safe_load((over / "kustomization.yaml").read_text())["patches"]
            for patch in (yaml.safe_load((over / each["path"]).read_text()) for each in patches):
                (patched,) = (
                    each for each in found if (each["kind"], each["metadata"]["name"]) == named(patch)
                )
                found[found.index(patched)] = merged(patched, patch)
        rendered = yaml.safe_dump_all(found)
    (tmp_path / "all.yaml").write_text(rendered)
    return [each for each in yaml.safe_load_all(rendered) if each]


def named(patch: Any) -> tuple[str, str]:
    return patch["kind"], patch["metadata"]["name"]


def merged(under: Any, over: Any) -> Any:
    """A strategic merge, as far as the patches need one: lists of objects by name."""
    if isinstance(under, dict) and isinstance(over, dict):
        return under | {key: merged(under[key], over[key]) if key in under else over[key] for key in over}
    if isinstance(under, list) and isinstance(over, list):
        both = {each["name"]: each for each in under}
        for each in over:
            both[each["name"]] = merged(both[each["name"]], each) if each["name"] in both else each
        return list(both.values())
    return over


def test_the_dockerfile_passes_hadolint(deploy: Path) -> None:
    succeeds(BIN / "hadolint", deploy / "docker" / "Dockerfile")


def test_the_image_is_small_locked_and_not_roots(deploy: Path) -> None:
    text = (deploy / "docker" / "Dockerfile").read_text()
    build, _, final = text.partition("\nFROM python:3.12-slim-bookworm\n")
    assert "PIP_CONSTRAINT=/source/requirements.lock" in build
    assert "pip install" not in final, "nothing is built in the image that is shipped"
    assert re.search(r"^USER 10001:10001$", final, re.MULTILINE)
    assert "HEALTHCHECK" in final
    for copied in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / path).exists() for path in copied.split())


def test_containers_of_the_compose_file_wait_for_the_secret_and_cannot_write(deploy: Path) -> None:
    compose = yaml.safe_load((deploy / "docker" / "compose.yml").read_text())
    services = compose["services"]
    assert set(services) == {"secret", "coordinator", "worker", "prometheus", "grafana"}
    for name in ("secret", "coordinator", "worker"):
        assert services[name]["read_only"] and services[name]["cap_drop"] == ["ALL"]
    assert services["coordinator"]["depends_on"]["secret"] == {"condition": "service_completed_successfully"}
    assert services["worker"]["depends_on"]["coordinator"] == {"condition": "service_healthy"}
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (deploy / "docker" / source).resolve().is_dir()
            else:
                assert source in compose["volumes"]


def test_the_objects_fit_the_schemas_of_kubernetes(objects: list[Any], tmp_path: Path) -> None:
    succeeds(BIN / "kubernetes-validate", "--strict", tmp_path / "all.yaml")
    kinds = {found["kind"] for found in objects}
    assert kinds >= {"StatefulSet", "Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}


def test_pods_have_probes_limits_and_no_privileges(objects: list[Any]) -> None:
    pods = [found["spec"]["template"]["spec"] for found in objects if "template" in found.get("spec", {})]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}
        for container in pod["containers"]:
            probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
            assert [probe["httpGet"]["path"] for probe in probes] == ["/healthz"] * 3


def test_probes_of_pods_with_tls_use_it(objects: list[Any], request: pytest.FixtureRequest) -> None:
    scheme = "HTTPS" if request.node.callspec.params["objects"] == "kubernetes-tls" else None
    for pod in (
        found["spec"]["template"]["spec"] for found in objects if "template" in found.get("spec", {})
    ):
        (node,) = pod["containers"]
        for kind in ("startup", "liveness", "readiness"):
            probe = node[f"{kind}Probe"]
            assert probe["httpGet"].get("scheme") == scheme
            assert probe["httpGet"]["port"] == "web" and probe["periodSeconds"] > 0
        given = {each["name"]: each.get("value") for each in node["env"]}
        assert given.get("NODE_TLS") == ("/run/minishuffle/tls" if scheme else None)
        mounted = {each["name"] for each in node["volumeMounts"]}
        assert "authority" not in mounted, "what runs jobs does not see the key of the CA"
        assert [each["name"] for each in pod["initContainers"] if each["name"] == "certificate"] == (
            ["certificate"] if scheme else []
        )


def test_the_compose_file_of_tls_goes_over_the_other(deploy: Path) -> None:
    over = yaml.safe_load((deploy / "docker" / "compose.tls.yml").read_text())["services"]
    base = yaml.safe_load((deploy / "docker" / "compose.yml").read_text())["services"]
    assert set(over) == {"secret", "coordinator", "worker", "prometheus"} <= set(base)
    for name in ("coordinator", "worker"):
        given = over[name]["environment"]
        assert given["NODE_TLS"] == over["secret"]["environment"]["NODE_TLS"]
        assert given["MINISHUFFLE_TLS_HTTP_CLIENTS"] == "${MINISHUFFLE_TLS_HTTP_CLIENTS:-token}"
        assert any(given["NODE_TLS"].startswith(path.partition(":")[0]) for path in base[name]["tmpfs"])
    (config,) = (word for word in over["prometheus"]["command"] if word.startswith("--config.file="))
    folder = next(path for path in base["prometheus"]["volumes"] if path.startswith("../prometheus:"))
    assert config.startswith(f"--config.file={folder.split(':')[1]}/")
    assert (deploy / "prometheus" / config.rpartition("/")[2]).exists()


def test_prometheus_has_the_same_configuration_with_tls(deploy: Path) -> None:
    plain, tls = (
        yaml.safe_load((deploy / "prometheus" / name).read_text())
        for name in ("prometheus.yml", "prometheus-tls.yml")
    )
    (job,) = tls["scrape_configs"]
    (discovery,) = job["http_sd_configs"]
    assert job.pop("scheme") == "https"
    files = job.pop("tls_config")
    assert discovery.pop("tls_config") == files
    assert {Path(path).name for path in files.values()} == {"ca.pem", "certificate.pem", "key.pem"}
    discovery["url"] = discovery["url"].replace("https://", "http://")
    assert tls == plain


def test_no_secret_is_shipped(deploy: Path) -> None:
    files = [path for path in deploy.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not [path for path in files if SECRET.search(path.read_text())]
    assert (deploy / "kubernetes" / ".gitignore").read_text() == "/secret\n"
    assert (deploy / "kubernetes-tls" / ".gitignore").read_text() == "/ca.pem\n/ca-key.pem\n"


@pytest.mark.extra
def test_units_are_well_formed_and_do_not_run_as_root(deploy: Path, tmp_path: Path) -> None:
    units = []
    program = tmp_path / "minishuffle"  # a unit would need quotes around a path with a space
    program.symlink_to(BIN / "minishuffle")
    for path in sorted((deploy / "systemd").glob("*.service")):
        text = path.read_text()
        assert "User=minishuffle\n" in text and "NoNewPrivileges=yes\n" in text
        assert "Restart=always\n" in text and "Type=notify\n" in text
        seconds = WATCHDOG_TIMEOUTS * ClusterSettings().heartbeat_timeout
        assert f"WatchdogSec={seconds:g}\nWatchdogSignal=SIGKILL\n" in text
        assert ("--take-over" in text) == ("coordinator start" in text), "systemd has ended the last one"
        unit = tmp_path / path.name.replace("@", "@1")
        unit.write_text(text.replace("/opt/minishuffle/bin/minishuffle", str(program)))
        units.append(unit)
    assert len(units) == 2
    succeeds("systemd-analyze", "verify", *units)


def test_each_file_that_the_document_names_is_there(deploy: Path) -> None:
    text = (deploy / "README.md").read_text()
    named = set(re.findall(r"deploy/[\w./-]+\w", text)) - {"deploy/kubernetes/secret", "deploy/systemd"}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_workers_have_the_time_that_their_tasks_take_to_move(deploy: Path, objects: list[Any]) -> None:
    seconds = ClusterSettings().drain_timeout + 2
    compose = yaml.safe_load((deploy / "docker" / "compose.yml").read_text())
    assert compose["services"]["worker"]["stop_grace_period"] == f"{seconds:g}s"
    (workers,) = (each for each in objects if each["kind"] == "Deployment")
    assert workers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds
    unit = (deploy / "systemd" / "minishuffle-worker@.service").read_text()
    assert f"\nTimeoutStopSec={seconds:g}\n" in unit
