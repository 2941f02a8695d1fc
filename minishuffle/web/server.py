"""The HTTP servers of a worker and of the coordinator: metrics, REST and the web page.

They run on the process's own event loop and read snapshots, so a scrape costs the loop a few
milliseconds and the data path nothing. Who may ask for what is decided in :mod:`~minishuffle.web.guard`.
Connections are few and do not stay idle: whoever opens many, or sends half of
a request, costs a process a bounded number of file descriptors for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from minishuffle import limits
from minishuffle.counters import CoordinatorSnapshot, WorkerEntry, WorkerSnapshot
from minishuffle.ids import Address
from minishuffle.observe.exposition import Exposition
from minishuffle.observe.metrics import coordinator_exposition, worker_exposition
from minishuffle.observe.prometheus import SD_REFRESH_SECONDS
from minishuffle.transport.addresses import cannot_listen
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.forks import close_in_forks
from minishuffle.transport.tls import TlsLayer
from minishuffle.web.guard import HEALTH, PAGE, WebAccess, check_host, check_reader, reached_at, wants_page
from minishuffle.web.pages import PageFile, page_files
from minishuffle.web.pools import BUFFERS_PATH, worker_buffers
from minishuffle.web.refusals import answer_failures

if TYPE_CHECKING:
    from minishuffle.web.rest import CoordinatorSource

__all__ = ["HttpLimits", "WebServer", "serve_coordinator_web", "serve_worker_web"]

_TEXT: Final = b"this port speaks TLS: ask it with https://\n"
SPEAKS_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)
LOST_LISTED_SECONDS = 600.0
"""A target that leaves the list vanishes from Prometheus before an alert on it can fire."""

_log = logging.getLogger(__name__)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether a record tells of an error in here, and not of a request that made no sense."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log.addFilter(_is_our_fault)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How many connections a server has at once, and how long one may take over the head of a request."""

    connections: int = limits.HTTP_CONNECTIONS_MAX
    idle_seconds: float = limits.HTTP_IDLE_SECONDS_MAX


DEFAULT = HttpLimits()


class WebServer:
    """A server that listens until it is closed."""

    def __init__(self, runner: web.AppRunner, listener: asyncio.Server) -> None:
        self._runner = runner
        self._listener = listener
        self.port: int = listener.sockets[0].getsockname()[1]
        """The port that it listens on, also when port 0 was asked for."""

    async def close(self) -> None:
        """Stop listening and close what is open; harmless when done twice."""
        self._listener.close()
        await self._runner.cleanup()


async def serve_worker_web(
    snapshot: Callable[[], WorkerSnapshot],
    port: int,
    access: WebAccess,
    http: HttpLimits = DEFAULT,
    *,
    tls: Credentials | None = None,
) -> WebServer:
    """Serve a worker's ``/metrics``, ``/healthz``, and the buffers of its tasks; port 0 takes a free one.
    With ``tls`` it is HTTPS.

    Raises:
        UsageError: the port is taken, or ``host`` is not an address of this machine.
    """
    app = _application(access, worker_exposition(snapshot, version("minishuffle")))

    async def buffers(_request: web.Request) -> web.Response:
        return web.Response(
            body=worker_buffers(snapshot()).model_dump_json().encode(), content_type="application/json"
        )

    is_running = False

    async def health(_request: web.Request) -> web.Response:
        nonlocal is_running
        is_running = is_running or bool(snapshot().epoch)  # Anybody may ask: it is to cost nothing.
        return _health("running" if is_running else "starting")

    app.router.add_get(BUFFERS_PATH, buffers)
    app.router.add_get(HEALTH, health)
    return await _serve(app, access.bound, port, http, tls)


async def serve_coordinator_web(
    source: CoordinatorSource,
    port: int,
    access: WebAccess,
    http: HttpLimits = DEFAULT,
    *,
    tls: Credentials | None = None,
) -> WebServer:
    """Serve the coordinator's ``/metrics``, ``/sd/prometheus``, ``/healthz``, REST interface and web page.
    With ``tls`` it is HTTPS, as the servers of workers are then.

    Raises:
        UsageError: the port is taken, or ``host`` is not an address of this machine.
    """
    from minishuffle.web.rest import RestInterface  # For weight: a worker does without it.

    release = version("minishuffle")
    app = _application(access, coordinator_exposition(source.snapshot, release))

    async def service_discovery(request: web.Request) -> web.Response:
        return web.json_response(
            _target_groups(reached_at(request), source.snapshot()),
            headers={"X-Prometheus-Refresh-Interval-Seconds": str(SD_REFRESH_SECONDS)},
        )

    pages = {name: PageFile(name, content) for name, content in page_files().items()}

    async def index(request: web.Request) -> web.Response:
        """The page for browsers, and a plain list of what can be read for others."""
        if wants_page(request):
            return await pages["index.html"].serve(request)
        return web.Response(text=_index_text(request, source.snapshot()))

    async def health(_request: web.Request) -> web.Response:
        return _health("running" if source.journal_writable else "journal not writable")

    app.router.add_get("/sd/prometheus", service_discovery)
    app.router.add_get(HEALTH, health)
    app.router.add_get("/", index)
    for name, page in pages.items():
        app.router.add_get(f"{PAGE}{name}", page.serve)
    RestInterface(source, release, access.read_token, tls).add_to(app)
    return await _serve(app, access.bound, port, http, tls)


def _health(state: str) -> web.Response:
    """Status 200 as long as the event loop answers: a liveness probe must not end a process that waits for a
    disk."""
    return web.json_response({"state": state}, headers={"Cache-Control": "no-store"})


@web.middleware
async def _not_for_forks(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checked with each request, since aiohttp reports no new connection."""
    if request.transport is not None:
        close_in_forks(request.transport.get_extra_info("socket"))
    return await handler(request)


def _application(access: WebAccess, exposition: Exposition) -> web.Application:
    guards = [answer_failures, check_host(access), check_reader(access)]
    app = web.Application(middlewares=[_not_for_forks, *guards])

    async def metrics(request: web.Request) -> web.Response:
        body, kind = exposition.answer(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": kind})

    app.router.add_get("/metrics", metrics)
    return app


async def _serve(
    app: web.Application, host: str, port: int, http: HttpLimits, tls: Credentials | None
) -> WebServer:
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_log,
        keepalive_timeout=http.idle_seconds,  # From the start of a connection, so a slow head counts too.
        shutdown_timeout=limits.HTTP_CLOSE_SECONDS_MAX,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        listener = await asyncio.get_running_loop().create_server(
            _accepting(runner.server, http.connections, tls), host, port, backlog=http.connections
        )
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error, "--web-port") from error
    close_in_forks(*listener.sockets)
    return WebServer(runner, listener)


def _accepting(server: web.Server, most: int, tls: Credentials | None) -> Callable[[], asyncio.BaseProtocol]:
    """Has the oldest connection make room for a new one. Refusing the new one would lock everybody out as
    long as somebody holds as many as there may be."""
    closed = 0
    layer = None if tls is None else TlsLayer(tls, SPEAKS_TLS)

    def accept() -> asyncio.BaseProtocol:
        nonlocal closed
        open_now = [handler for handler in server.connections if handler.transport is not None]
        for handler in open_now[: max(0, len(open_now) + 1 - most)]:
            transport = handler.transport
            handler.force_close()
            if transport is not None:
                transport.abort()  # Otherwise a client that does not read its answer would keep it open.
            closed += 1
            if closed & (closed - 1) == 0:  # The 1st, 2nd, 4th, …: a flood does not fill the log.
                _log.warning("more than %d HTTP connections at once: %d closed so far", most, closed)
        return server() if layer is None else layer.accept(server(), web=True)

    return accept


def _target_groups(coordinator: Address, snapshot: CoordinatorSnapshot) -> list[dict[str, object]]:
    """The whole list, as Prometheus' http_sd wants it: the coordinator and its workers."""
    groups: list[dict[str, object]] = [
        {"targets": [str(coordinator)], "labels": {"__meta_minishuffle_role": "coordinator"}}
    ]
    for worker in _listed_workers(snapshot):
        labels = {"__meta_minishuffle_role": "worker", "__meta_minishuffle_worker": str(worker.worker)}
        groups.append({"targets": [_target(worker)], "labels": labels})
    return groups


def _listed_workers(snapshot: CoordinatorSnapshot) -> list[WorkerEntry]:
    """The workers that are alive or were lost a short while ago; those that left in order are gone."""
    return [
        worker
        for worker in sorted(snapshot.workers, key=lambda worker: worker.worker)
        if worker.state == "alive"
        or (worker.state == "lost" and worker.heartbeat_age_seconds <= LOST_LISTED_SECONDS)
    ]


def _target(worker: WorkerEntry) -> str:
    return str(Address(worker.host, worker.metrics_port))


def _index_text(request: web.Request, snapshot: CoordinatorSnapshot) -> str:
    coordinator, scheme = reached_at(request), request.scheme
    lines = [
        "minishuffle coordinator",
        "",
        f"{scheme}://{coordinator}/metrics",
        f"{scheme}://{coordinator}/sd/prometheus",
        f"{scheme}://{coordinator}/openapi.json",
        "",
        *(
            f"worker {worker.worker} ({worker.state})  {scheme}://{_target(worker)}/metrics"
            for worker in _listed_workers(snapshot)
        ),
    ]
    return "\n".join(lines) + "\n"
