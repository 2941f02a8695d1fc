"""What every command shares: global options, where the cluster is, and how output looks."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from minishuffle.cli.ownprocesses import LAUNCHER, alive, own_processes
from minishuffle.cli.terminal import echo
from minishuffle.client import Client
from minishuffle.config import (
    ENVIRONMENT_PREFIX,
    ClusterSettings,
    TlsFiles,
    default_secret_file,
    default_state_dir,
    read_coordinator,
    read_secret,
    tls_files_of,
)
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.launch import checked_settings
from minishuffle.transport.credentials import Credentials
from minishuffle.wire.requests import JOB_LIVE

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_WEB_PORT",
    "FileToWrite",
    "FiniteRange",
    "Session",
    "global_options",
    "guarantee_option",
    "json_option",
    "late_global_options",
    "print_json",
    "session_of",
    "settings_from",
    "settings_options",
]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8471
DEFAULT_WEB_PORT = 8472
REQUEST_SECONDS_MAX = 10.0
RECONNECT_SECONDS_MAX = 60.0
"""How long 'submit --wait' and '--follow' go on without a coordinator."""

GLOBAL_SETTINGS = ("tls_certificate", "tls_key", "tls_ca")
"""Settings that commands without settings have too, as global options."""

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(slots=True)
class Session:
    """The global options, and what follows from them."""

    coordinator: str | None = None
    secret_file: Path | None = None
    tls_certificate: str | None = None
    """Empty: there is to be no TLS, whatever the state directory says; so with the next two."""
    tls_key: str | None = None
    tls_ca: str | None = None
    state_dir: Path | None = None
    cluster: str = "default"
    debug: bool = False
    verbose: int = 0

    def directory(self) -> Path:
        """The state directory: ``--state-dir`` or one under the user's state directory."""
        if self.state_dir is not None:
            return self.state_dir
        return default_state_dir(self.cluster)

    def make_directory(self) -> Path:
        """The state directory, which is there after this.

        Raises:
            UsageError: it cannot be made.
        """
        path = self.directory()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the state directory {path}: {error.strerror}; name another with --state-dir"
            ) from error
        return path

    def snapshot_dir(self) -> str:
        """Where snapshots of this cluster are: as the environment says, else as its coordinator does while it
        is there, else in the state directory."""
        place = read_coordinator(self.directory())
        found = checked_settings(None).snapshot_dir or (place.snapshot_dir if place is not None else "")
        return found or str(self.directory() / "snapshots")

    def flags(self) -> str:
        """The global options that find this cluster again, with a blank in front."""
        given = []
        if self.state_dir is not None:
            given += ["--state-dir", str(self.state_dir)]
        if self.secret_file is not None:
            given += ["--secret-file", str(self.secret_file)]
        if self.cluster != "default":
            given += ["--cluster", self.cluster]
        if self.tls_certificate:
            given += ["--tls-certificate", self.tls_certificate]
            given += ["--tls-key", self.tls_key or "", "--tls-ca", self.tls_ca or ""]
        return "".join(f" {shlex.quote(word)}" for word in given)

    def no_job_runs(self) -> UsageError:
        return UsageError(f"no job runs: 'minishuffle{self.flags()} submit keyby' starts one")

    def only_job(self, client: Client) -> str:
        """The job that is meant where none is named. Raises UsageError: not exactly one job runs."""
        running = [job.job for job in client.jobs(tasks=False) if job.state in JOB_LIVE]
        if not running:
            raise self.no_job_runs()
        if len(running) > 1:
            raise UsageError(f"several jobs run, {', '.join(running)}: name one of them")
        return running[0]

    def secret_path(self) -> Path:
        return self.secret_file if self.secret_file is not None else default_secret_file(self.directory())

    def secret(self) -> bytes:
        """Raises UsageError when there is none that can be used."""
        return read_secret(self.secret_path())

    def tls_files(self) -> TlsFiles | None:
        """What was given, else what the coordinator uses that was started last in the state directory.

        Raises:
            UsageError: some files are missing.
        """
        given = (self.tls_certificate, self.tls_key, self.tls_ca)
        where = None if self.coordinator is None else Address.parse(self.coordinator)
        return tls_files_of(given, self.directory(), where)

    def credentials(self) -> Credentials | None:
        """Of :meth:`tls_files`; None: there is to be no TLS.

        Raises:
            UsageError: they cannot be used.
        """
        files = self.tls_files()
        return None if files is None else Credentials(files)

    def address(self) -> Address:
        """``--coordinator``, else the one that was started last in the state directory, else the default port
        on loopback."""
        if self.coordinator is not None:
            return Address.parse(self.coordinator)
        if (place := read_coordinator(self.directory())) is not None:
            return place.address
        record = self.record()
        if record is not None:
            return Address.parse(record["coordinator"])
        return Address(DEFAULT_HOST, DEFAULT_PORT)

    def _down(self) -> str:
        """What to say of a coordinator that is not there, if no command says where it is and none is on
        record; else nothing."""
        placed = self.coordinator is not None or read_coordinator(self.directory()) is not None
        if placed or self.record() is not None:
            return ""
        return f"cluster {self.cluster!r} is down: 'minishuffle{self.flags()} cluster up' starts it"

    def record_path(self) -> Path:
        return self.directory() / "cluster.json"

    def record(self) -> dict[str, Any] | None:
        """What ``cluster up`` wrote about the cluster of this name, or None."""
        path = self.record_path()
        try:
            if not path.is_file():
                return None
            record = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}; name another state directory with --state-dir"
            ) from error
        except ValueError as error:
            raise UsageError(f"{path} is damaged ({error}); remove it") from None
        if not isinstance(record, dict) or "coordinator" not in record:
            raise UsageError(f"{path} is not a cluster's record; remove it")
        return record

    def missing(self) -> str:
        """Which of the two is gone that commands need, the state directory or the secret; empty if none."""
        if _is_gone(self.directory()):
            return f"the state directory {self.directory()} is gone"
        return f"the secret at {self.secret_path()} is gone" if _is_gone(self.secret_path()) else ""

    def running_without(self) -> UsageError | None:
        """What to say if that is so, and processes of the cluster run on this machine; else None."""
        missing = self.missing()
        record = (self.record() or own_processes(self.directory())) if missing else None
        left = alive(record) if record is not None else {}
        if not left.keys() - {LAUNCHER}:  # One that is just starting has none of the others.
            return None
        names = ", ".join(f"{name} (pid {pid})" for name, pid in left.items())
        return UsageError(
            f"{missing}, and of cluster {self.cluster!r} there run {names}: "
            f"'minishuffle{self.flags()} cluster down' stops them"
        )

    @contextlib.contextmanager
    def client(self, timeout: float = REQUEST_SECONDS_MAX) -> Iterator[Client]:
        """A client for the length of the block. It waits and follows while the coordinator is away, for
        :data:`RECONNECT_SECONDS_MAX`.

        Raises:
            UsageError: there is no secret that can be used.
            PeerLost: no coordinator answers; if none is on record, it says that the cluster is down.
        """
        address = self.address()
        try:
            secret = self.secret()
        except UsageError as error:
            raise self.running_without() or error from None
        with Client(
            address,
            secret,
            cluster=self.cluster,
            timeout=timeout,
            reconnect_timeout=RECONNECT_SECONDS_MAX,
            find=self.address,
            tls=self.credentials(),
        ) as client:
            try:
                yield client
            except PeerLost as error:
                if down := self._down():
                    raise PeerLost(down) from error
                raise


def _is_gone(path: Path) -> bool:
    """Not so if nobody can say."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def session_of(context: click.Context) -> Session:
    """The session of a command's context; there is exactly one in a run."""
    return context.find_root().ensure_object(Session)


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Note a global option when it was given, so that it may stand before or after the command."""
    given = context.get_parameter_source(parameter.name or "")
    if given not in (click.core.ParameterSource.DEFAULT, None):
        setattr(session_of(context), parameter.name or "", value)


def _global_options(hidden: bool) -> list[Callable[[Command], Command]]:
    option = functools.partial(click.option, expose_value=False, callback=_keep, hidden=hidden)

    def place(flag: str, **attributes: Any) -> Callable[[Command], Command]:
        """An option that says where the cluster is, in the environment too."""
        variable = ENVIRONMENT_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
        # Read once, by the group, so that a flag in front of the command wins over it.
        return option(flag, envvar=None if hidden else variable, show_envvar=True, **attributes)

    path = click.Path(path_type=Path)
    return [
        place(
            "--coordinator",
            metavar="HOST:PORT",
            help=f"Where the coordinator is; by default that of --cluster, or {DEFAULT_HOST}:{DEFAULT_PORT}.",
        ),
        place("--cluster", metavar="NAME", default="default", help="Name of the cluster.", show_default=True),
        place(
            "--state-dir", type=path, help="Default: $XDG_STATE_HOME/minishuffle/NAME, readable by you alone."
        ),
        place("--secret-file", type=path, help="Default: the file 'secret' in the state directory."),
        place(
            "--tls-certificate",
            metavar="FILE",
            help="A certificate (PEM), for TLS; by default that of the coordinator in the state directory.",
        ),
        place("--tls-key", metavar="FILE", help="Its private key."),
        place("--tls-ca", metavar="FILE", help="The CAs that the certificates of all processes are of."),
        option("--debug", is_flag=True, help="Show the traceback of an error."),
        option("-v", "--verbose", count=True, help="Log more; twice for everything."),
    ]


def global_options(command: Command) -> Command:
    """The global options of the group."""
    for option in reversed(_global_options(hidden=False)):
        command = option(command)
    return command


def late_global_options(command: Command) -> Command:
    """The same on a command, so that they may follow it; its help leaves them to the group's."""
    for option in reversed(_global_options(hidden=True)):
        command = option(command)
    return command


class FiniteRange(click.FloatRange):
    """A range of numbers, of which neither NaN (which is in every range of click) nor infinity is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class FileToWrite(click.Path):
    """A file that is written once all is measured: refused at once where there is no folder for it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {path.parent}: make it, or name another", param, ctx)
        return path


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(
        command
    )


def guarantee_option(command: Command) -> Command:
    return click.option(
        "--guarantee",
        type=click.Choice(["loss", "at_least_once"]),
        default="loss",
        show_default=True,
        help="What the job asks for: rows and state are lost with what fails, and counted, or nothing is.",
    )(command)


def print_json(value: Any) -> None:
    """One line; what JSON cannot carry as text (a date, bytes, a key that is a tuple), NaN as null."""
    echo(json.dumps(_plain(value), default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    """The same with floats and keys that JSON has; values of other types are left to ``default``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): _plain(under) for key, under in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _key(key: Any) -> str:
    # True, None and numbers as json.dumps writes them where they are keys.
    return json.dumps(key) if key is None or isinstance(key, (bool, int)) else str(key)


def settings_options(command: Command) -> Command:
    """One flag for every field of ClusterSettings, and ``--config``; read with :func:`settings_from`."""
    for name, field in reversed(ClusterSettings.model_fields.items()):
        if name in GLOBAL_SETTINGS:
            continue
        flag = name.replace("_", "-")
        declared = f"--{flag}/--no-{flag}" if field.annotation is bool else f"--{flag}"
        text = f"Default: {field.default}; environment: MINISHUFFLE_{name.upper()}."
        kind: Any = field.annotation
        if get_origin(kind) is Literal:
            kind = click.Choice(get_args(kind))
        elif get_args(kind):  # A number or a word: ClusterSettings says what fits.
            kind = str
        command = click.option(declared, name, type=kind, default=None, help=text)(command)
    config = click.option(
        "--config", type=click.Path(path_type=Path, dir_okay=False), help="A TOML file with settings."
    )
    return config(command)


def settings_from(values: dict[str, Any]) -> ClusterSettings:
    """The settings of a command that has :func:`settings_options`; takes them out of ``values``."""
    toml = values.pop("config")
    given = {name: values.pop(name) for name in ClusterSettings.model_fields if name not in GLOBAL_SETTINGS}
    session = session_of(click.get_current_context())
    given |= {name: getattr(session, name) for name in GLOBAL_SETTINGS}
    return checked_settings(toml, **{name: value for name, value in given.items() if value is not None})
