"""Settings: built-in defaults < TOML file < environment (``MINISHUFFLE_…``) < flags; and the secret."""

from __future__ import annotations

import difflib
import hmac
import json
import logging
import os
import pwd
import secrets
import shlex
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from minishuffle import limits
from minishuffle.errors import UnknownName, UsageError
from minishuffle.ids import Address

__all__ = [
    "ENVIRONMENT_PREFIX",
    "HASH_SEED",
    "ClusterSettings",
    "CoordinatorFinder",
    "CoordinatorPlace",
    "TlsFiles",
    "checked_secret",
    "create_secret",
    "default_secret_file",
    "default_state_dir",
    "forget_coordinator",
    "hash_seed",
    "load_settings",
    "read_coordinator",
    "read_secret",
    "read_token",
    "tls_files_of",
    "web_token",
    "with_tls_files",
    "write_coordinator",
]

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
ENVIRONMENT_PREFIX = "MINISHUFFLE_"
HASH_SEED = "PYTHONHASHSEED"
"""The variable that says how Python hashes texts and bytes, from its start on."""
NO_SETTINGS = frozenset({"cluster", "coordinator", "secret_file", "seed", "soak", "state_dir"})
"""Names in the environment that mean something else: to the command line, and to the tests."""


class TlsFiles(NamedTuple):
    """Paths of PEM files; the values of ``tls_certificate``, ``tls_key`` and ``tls_ca``."""

    certificate: str
    key: str
    ca: str


class ClusterSettings(BaseSettings):
    """Settings of the processes of a cluster; seconds and bytes unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    segment_bytes: int = Field(
        limits.SEGMENT_BYTES_DEFAULT, ge=limits.SEGMENT_BYTES_MIN, le=limits.SEGMENT_BYTES_MAX
    )
    network_memory_bytes: int = Field(limits.NETWORK_MEMORY_BYTES_DEFAULT, ge=64 * 1024)
    slots: int = Field(2, ge=1, le=limits.SLOTS_MAX)
    heartbeat_interval: float = Field(0.5, gt=0)
    heartbeat_timeout: float = Field(3.0, gt=0)
    """A worker that says nothing for so long is lost. Six heartbeats: with eight threads that compute in pure
    Python, their longest delay was 0.15 s in the worker (the 99th percentile: 0.11 s) and is as much in the
    coordinator if it shares the processor, so that a worker that lives is never that late."""
    host_timeout: float | Literal["off"] = 0.6
    """A host whose kernel is silent for so long is lost, with all of its workers: it was cut off, or has lost
    its power. For that two others have to find that it completes and refuses no connection."""
    suspect_after: float = Field(0.5, gt=0)
    """A worker that answers no Ping of another one for so long is suspected: what is sent to it is dropped or
    waits, until it answers, and only the coordinator can say that it is lost. Where all jobs wait for their
    consumers it has ``heartbeat_timeout`` instead. With eight threads that compute in pure Python on both
    sides an answer took 0.08 s at most, and has three quarters of this."""
    ping_interval: float = Field(5.0, gt=0)
    """Seconds of silence before a Ping on the connection of an external client."""
    task_cancel_timeout: float = Field(10.0, gt=0)
    """A task that still runs user code this long after a cancel is abandoned."""
    abandoned_max: int = Field(4, ge=1)
    """A worker exits if more abandoned tasks than this still run in it."""
    switch_interval: float = Field(0.0005, gt=0, le=0.1)
    """The interpreter's thread switch interval in a worker."""
    partition_request_timeout: float = Field(10.0, gt=0)
    reconnect_timeout: float = Field(10.0, gt=0)
    """A task that stays this long in one call of its function, while the next attempt of a producer waits for
    it to read what is left of a channel, is stuck and is restarted itself. It is looked at that often: this
    takes up to twice as long. Time in which it waits for its consumers does not count."""
    link_timeout: float = Field(10.0, gt=0)
    """How long tasks of a job may need a connection between two workers that cannot be made, or broke, before
    that is an event of the job, and one of the two is excluded from it. Not less than ``heartbeat_timeout``
    counts: a worker that is lost explains it."""
    coordinator_timeout: float = Field(300.0, gt=0)
    """How long a worker that has lost its coordinator runs on and looks for it before it exits."""
    slot_timeout: float = Field(60.0, gt=0)
    """How long tasks of a lost worker wait for a free slot before their job fails."""
    drain_timeout: float = Field(8.0, ge=0, allow_inf_nan=False)
    """How long a worker that was sent SIGTERM waits for free slots elsewhere for its tasks. Who ends
    processes has to give it 2 s more."""
    pause_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    """How long the tasks of a job that is to be paused may take until all of them stand. Then the pause
    fails, and they go on."""
    snapshot_dir: str = ""
    """Where savepoints are, unless they are put elsewhere: a directory that all workers and the coordinator
    share, or ``s3://bucket/folder``. Empty: ``snapshots`` in the state directory of the coordinator."""
    savepoint_timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """How long a savepoint may take until it is complete. Then it fails, and the job goes on."""
    spool_bytes_max: int = Field(limits.SPOOL_BYTES_MAX, ge=64 * 1024)
    """What each sink of a job that does not end keeps on disk for readers, above which it waits."""
    blocking_bytes_max: int = Field(limits.BLOCKING_BYTES_MAX, ge=64 * 1024)
    """What a worker stores of blocking exchanges and broadcast sides, in memory and on disk: what its tasks
    have written, and what they have read and not given out. A task that would store more fails."""
    retained_bytes: int = Field(limits.RETAINED_BYTES, ge=1024 * 1024)
    """What a worker retains of rows that were sent, until snapshots of their consumers cover them: a quarter
    of it in memory, the rest on disk. Beyond it tasks wait; at half of it snapshots are taken."""
    snapshot_memory_bytes: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """What a worker keeps in memory of the snapshots that it holds for tasks of other workers, and of copies
    of those that its own tasks have sent; the rest lies on its disk. ``auto``: a quarter of the machine's
    memory, at most 1 GiB."""
    web_auth: Literal["auto", "open", "token"] = "auto"
    """Who may read from the web ports, of metrics, REST and service discovery: everybody who reaches them, or
    who shows a token; ``auto``: everybody where the port is on loopback. Changes always take the token, and
    ``/healthz`` never does."""
    web_hosts: str = ""
    """Further names, separated by commas, under which the web ports are reached: those of a proxy, say."""
    tls_certificate: str = ""
    """A PEM file with the certificate of a process, for the address by which others reach it. With
    ``tls_key`` and ``tls_ca`` all connections use TLS 1.3; files that change are read again."""
    tls_key: str = ""
    """A PEM file with the private key of that, which its owner alone may read."""
    tls_ca: str = ""
    """A PEM file with the CAs that the certificates of all processes are of."""
    tls_http_clients: Literal["token", "certificate"] = "token"
    """With TLS, what clients of the web ports show: tokens as without it, or a certificate of ``tls_ca``, and
    for changes the token too. ``/healthz`` is open."""
    pin_workers: bool = True
    """On one machine, give each worker one processor, if all processors have equally many workers."""
    loop_lets_tasks_finish: bool = True
    """When a worker's loop wakes, it waits for the end of the time slice of the thread that runs. Rates are a
    tenth to a fifth higher; under more load than the processors bear records take 13 ms instead of 2."""
    use_uvloop: bool = True

    @model_validator(mode="after")
    def _relations(self) -> ClusterSettings:
        if self.heartbeat_timeout < 3 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout ({self.heartbeat_timeout} s) must be at least three times "
                f"heartbeat_interval ({self.heartbeat_interval} s)"
            )
        if self.host_timeout != "off" and not self.host_timeout >= limits.HOST_TIMEOUT_SECONDS_MIN:
            raise ValueError(
                f"host_timeout ({self.host_timeout} s) must be at least {limits.HOST_TIMEOUT_SECONDS_MIN} s, "
                "or off"
            )
        given = [bool(each) for each in (self.tls_certificate, self.tls_key, self.tls_ca)]
        if any(given) and not all(given):
            raise ValueError("tls_certificate, tls_key and tls_ca go together: set all three, or none")
        return self

    @property
    def tls_files(self) -> TlsFiles | None:
        """None: there is to be no TLS."""
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)
        return files if all(files) else None


def load_settings(toml: Path | None = None, **flags: Any) -> ClusterSettings:
    """Combine defaults, the TOML file (if given), the environment and ``flags`` that are not None.

    Raises:
        pydantic.ValidationError: a value does not fit; names the field.
        FileNotFoundError: ``toml`` does not exist.
        UnknownName: the file or the environment sets what is no setting.
        UsageError: the file is not TOML.
    """
    table = {} if toml is None else _table(toml)
    _check_environment()

    class _Layered(ClusterSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    return _Layered(**{name: value for name, value in flags.items() if value is not None})


def _table(toml: Path) -> dict[str, Any]:
    """What the file sets, by the names of settings."""
    if not toml.is_file():
        raise FileNotFoundError(f"settings file {toml} does not exist")
    try:
        with toml.open("rb") as file:
            table = tomllib.load(file)
    except ValueError as error:  # Of the syntax, or of the encoding.
        raise UsageError(f"settings file {toml} cannot be read: {error}") from None
    for name in table:
        if name not in ClusterSettings.model_fields:
            near = _near(name)
            known = ", ".join(sorted(ClusterSettings.model_fields))
            hint = f"did you mean {near!r}?" if near else f"the settings are {known}"
            raise UnknownName(f"settings file {toml}: there is no setting {name!r}; {hint}")
    return table


def _check_environment() -> None:
    """A name close to a setting's is a slip and an error. Any other may belong to somebody else.

    Kubernetes, for one, sets ``MINISHUFFLE_SERVICE_HOST`` for a service of that name.
    """
    for variable in os.environ:
        if not variable.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if name in ClusterSettings.model_fields or name in NO_SETTINGS:
            continue
        if near := _near(name):
            hint = f"did you mean {ENVIRONMENT_PREFIX}{near.upper()}?"
            raise UnknownName(f"environment variable {variable}: there is no such setting; {hint}")
        logger.warning("environment variable %s is ignored: there is no such setting", variable)


def _near(name: str) -> str | None:
    """The setting whose name is closest, if any is close."""
    return next(iter(difflib.get_close_matches(name.lower(), ClusterSettings.model_fields, 1)), None)


def default_state_dir(cluster: str, environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_STATE_HOME/minishuffle/<cluster>``, with ``~/.local/state`` when that is not set; of this user,
    by the ``environment`` of some process.

    Raises:
        UsageError: the cluster's name cannot name a directory, or there is no home directory.
    """
    if not cluster or "/" in cluster or "\0" in cluster or cluster in (".", ".."):
        raise UsageError(f"{cluster!r} cannot name a cluster: use letters, digits, '-' and '_'")
    base = environment.get("XDG_STATE_HOME", "")
    # A relative path there is to be ignored, says the XDG base directory specification.
    if os.path.isabs(base):
        return Path(base) / "minishuffle" / cluster
    return _home(environment) / ".local" / "state" / "minishuffle" / cluster


def _home(environment: Mapping[str, str]) -> Path:
    """The home directory: ``$HOME``, or what the password database says if that is empty or not set."""
    named = environment.get("HOME")
    if named:
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise UsageError(
            "this user has no home directory to keep the cluster's state in: set XDG_STATE_HOME or HOME, or "
            "name a place with --state-dir"
        ) from None


# --- where the coordinator is ---------------------------------------------------------------------

COORDINATOR_FILE = "coordinator.json"
"""In the state directory; each coordinator writes it anew at its start."""


class CoordinatorPlace(NamedTuple):
    """Where the coordinator that was started last listens, and its term."""

    address: Address
    term: int
    handed_over: bool = False
    """It has ended without an order to end the cluster: workers and jobs wait for the next one."""
    tls: TlsFiles | None = None
    """What it uses, which whoever finds it by this uses too, unless told otherwise."""
    snapshot_dir: str = ""
    """Its setting, as an absolute path or a URI; empty: ``snapshots`` in its state directory."""


def write_coordinator(state_dir: Path, place: CoordinatorPlace) -> None:
    """Have workers and commands of this state directory find that coordinator.

    Raises:
        UsageError: the file cannot be written.
    """
    path = state_dir / COORDINATOR_FILE
    new = path.with_suffix(".new")
    try:
        found: dict[str, Any] = {"coordinator": str(place.address), "term": place.term}
        if place.handed_over:
            found["handed_over"] = True
        if place.tls is not None:
            found["tls"] = place.tls._asdict()
        if place.snapshot_dir:
            found["snapshot_dir"] = place.snapshot_dir
        new.write_text(json.dumps(found) + "\n")
        new.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; name another state directory with --state-dir"
        ) from error


def read_coordinator(state_dir: Path) -> CoordinatorPlace | None:
    """What :func:`write_coordinator` wrote; None if there is nothing that can be read."""
    try:
        found = json.loads((state_dir / COORDINATOR_FILE).read_text())
        address = Address.parse(str(found["coordinator"]))
        files = found.get("tls")
        tls = None if files is None else TlsFiles(**files)
        snapshots = str(found.get("snapshot_dir", ""))
        return CoordinatorPlace(address, int(found["term"]), found.get("handed_over") is True, tls, snapshots)
    except (OSError, ValueError, TypeError, KeyError, UsageError):
        return None


class CoordinatorFinder:
    """Gives what :func:`read_coordinator` does, and reads the file only if it is another than before: whoever
    looks twice a second would read it in vain.

    Args:
        state_dir: the cluster's.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir
        self._path = str(state_dir / COORDINATOR_FILE)
        self._read: tuple[int, int, int] | None = None
        """Number, time and size of the file that was read last: a new file differs in them."""
        self._place: CoordinatorPlace | None = None

    def __call__(self) -> CoordinatorPlace | None:
        try:
            found = os.stat(self._path)
        except OSError:
            self._read = self._place = None
            return None
        now = found.st_ino, found.st_mtime_ns, found.st_size
        if now != self._read or self._place is None:  # first: a file that is replaced meanwhile is read again
            self._read, self._place = now, read_coordinator(self._directory)
        return self._place


def forget_coordinator(state_dir: Path, term: int) -> None:
    """The coordinator of that term has ended with its cluster; another's file stays."""
    place = read_coordinator(state_dir)
    if place is not None and place.term == term:
        (state_dir / COORDINATOR_FILE).unlink(missing_ok=True)


def with_tls_files(settings: ClusterSettings, files: TlsFiles) -> ClusterSettings:
    """The same settings with these files."""
    return settings.model_copy(update={f"tls_{name}": path for name, path in files._asdict().items()})


def tls_files_of(
    given: Sequence[str | None], state_dir: Path, coordinator: Address | None = None
) -> TlsFiles | None:
    """The certificate, key and CA that were ``given``; none of them: what the coordinator that was started
    last in the state directory uses, if that is the one at ``coordinator``.

    Returns:
        None: there is to be no TLS, also if they were given and are empty.

    Raises:
        UsageError: some are missing.
    """
    files = TlsFiles(*(path or "" for path in given))
    if all(files):
        return files
    if any(files):
        missing = ", ".join(f"--tls-{name}" for name, path in files._asdict().items() if not path)
        raise UsageError(f"a certificate, its key and the CA go together: give {missing}, too")
    if "" in given:
        return None
    place = read_coordinator(state_dir)
    return place.tls if place is not None and coordinator in (None, place.address) else None


def default_secret_file(state_dir: Path) -> Path:
    """Where a cluster with that state directory keeps its secret."""
    return state_dir / "secret"


def create_secret(path: Path) -> bytes:
    """Make a secret of 32 random bytes, in hexadecimal, readable by this user alone; returns it.

    Raises:
        UsageError: there is a file already, or it cannot be written.
    """
    secret = secrets.token_hex(SECRET_BYTES).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secret + b"\n")
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise UsageError(f"there is a secret at {path} already; use it, or remove it first") from None
        raise UsageError(
            f"cannot write a secret to {path}: {error.strerror}; name another place with --secret-file"
        ) from error
    return secret


def web_token(secret: bytes) -> str:
    """What the REST interface asks for before it changes anything: it follows from the secret, and does not
    give it away. Processes of the cluster send it to nobody."""
    return hmac.digest(secret, b"minishuffle web token", "sha256").hex()


def read_token(secret: bytes) -> str:
    """What opens the same for reading, and changes nothing: for Prometheus, and what processes of the cluster
    read from each other."""
    return hmac.digest(secret, b"minishuffle web token, for reading", "sha256").hex()


def read_secret(path: Path) -> bytes:
    """The secret in that file, without white space around it.

    Raises:
        UsageError: missing, too short, not readable, or readable by other users.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except FileNotFoundError:
        raise UsageError(
            f"there is no secret at {path}; 'minishuffle cluster up' makes one, "
            "or name the cluster's with --secret-file"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot read the secret at {path}: {error.strerror}; name the cluster's with --secret-file"
        ) from error
    if mode & 0o077:
        raise UsageError(f"other users may read the secret at {path} (mode {mode:04o}); chmod 600 {path}")
    return checked_secret(secret, path)


def hash_seed(secret: bytes) -> str:
    """The value of :data:`HASH_SEED` for all workers of a cluster: a set of texts has one order in them, so
    that the rows which a function makes of it come in that order again when its task goes on elsewhere.
    Nobody guesses it who could send keys that hash alike."""
    return str(int.from_bytes(hmac.digest(secret, b"minishuffle hashes", "sha256")[:4]))


def checked_secret(secret: bytes, path: Path | None = None) -> bytes:
    """That secret, from the file ``path`` if it is from one.

    Raises:
        UsageError: it is too short.
    """
    if len(secret) < limits.SECRET_CHARS_MIN:
        where, file = (f" at {path}", shlex.quote(str(path))) if path is not None else ("", "FILE")
        raise UsageError(
            f"the secret{where} has {len(secret)} characters, and a shorter one than "
            f"{limits.SECRET_CHARS_MIN} can be guessed: replace it with "
            f"'(umask 077; openssl rand -hex 32 > {file})', give it to all processes "
            "of the cluster, and start them anew"
        )
    return secret
