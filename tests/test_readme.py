"""What the README says of settings, commands and targets is what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from minishuffle.cli.main import cli
from minishuffle.config import ClusterSettings
from minishuffle.dataflow.graph import JobSettings


@pytest.fixture
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def test_the_settings_and_their_defaults_are_those_of_the_code(readme: str) -> None:
    section = readme.partition("## Settings")[2].partition("\n## ")[0]
    listed: dict[str, object] = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
        values = [json.loads(default) for default in defaults.split(", ")]
        listed.update(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    assert listed == {name: field.default for name, field in ClusterSettings.model_fields.items()}
    for name, field in JobSettings.model_fields.items():
        assert re.search(rf"`{name}`\s+\({re.escape(str(field.default))}[ );]", section), name


def test_every_command_of_the_tour_exists(readme: str) -> None:
    commands = re.findall(r"^    minishuffle (.+?)(?:  .*)?$", readme, re.MULTILINE)
    assert len(commands) >= 10
    for line in commands:
        command: click.Command | None = cli
        for word in line.split():
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
        assert command is not None, line
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert set(re.findall(r"--[\w-]+", line)) <= flags, line


def test_every_make_target_that_is_named_exists(readme: str, repository: Path) -> None:
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", readme, re.MULTILINE))
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
