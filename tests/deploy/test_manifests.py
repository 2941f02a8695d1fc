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


@pytest.fixture
def objects(deploy: Path, tmp_path: Path) -> list[Any]:
    """The kustomize base with a secret: as kustomize renders it if that is there, else its resources."""
    base = shutil.copytree(deploy / "kubernetes", tmp_path / "kubernetes")
    (base / "secret").write_text("x")
    if shutil.which("kubectl"):
        rendered = succeeds("kubectl", "kustomize", base)
    else:
        resources = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
        rendered = "---\n".join((base / name).read_text() for name in resources)
    (tmp_path / "all.yaml").write_text(rendered)
    return [found for found in yaml.safe_load_all(rendered) if found]


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


def test_no_secret_is_shipped(deploy: Path) -> None:
    files = [path for path in deploy.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not [path for path in files if SECRET.search(path.read_text())]
    assert (deploy / "kubernetes" / ".gitignore").read_text() == "/secret\n"


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
