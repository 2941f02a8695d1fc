"""A worker process from its start to its end: it listens, registers, and serves until it is to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol

from minishuffle.config import ClusterSettings, CoordinatorPlace
from minishuffle.counters import (
    WorkerSnapshot,
)
from minishuffle.errors import PeerLost, UsageError
from minishuffle.ids import Address
from minishuffle.transport.control import ControlLink, connect_control
from minishuffle.transport.credentials import Credentials
from minishuffle.transport.interfaces import address_toward
from minishuffle.wire.advertised import is_loopback, is_wildcard
from minishuffle.wire.frames import Role
from minishuffle.wire.handshake import Identity
from minishuffle.worker.interpreter import tune_interpreter
from minishuffle.worker.process import Worker, register
from minishuffle.worker.registration import COORDINATOR_SECONDS_MAX, UnregisteredWorker
from minishuffle.worker.reports.workerreports import registration
from minishuffle.worker.tasks.crashrecord import CrashRecord

__all__ = ["run_worker"]

LOOPBACK: Final = "127.0.0.1"
READY: Final = {"worker", "epoch", "pid", "data_port", "metrics_port"}
"""Keys of the message to a worker's launcher once the worker is registered."""


class _Closeable(Protocol):
    @property
    def port(self) -> int: ...

    async def close(self) -> None: ...


async def run_worker(
    settings: ClusterSettings,
    *,
    coordinator: Address,
    secret: bytes,
    cluster: str,
    host: str,
    advertise: str = "",
    requested_worker: int,
    standby: bool = False,
    spool_directory: str | None = None,
    find: Callable[[], CoordinatorPlace | None] = lambda: None,
    record: CrashRecord,
    tls: Credentials | None = None,
    web: Callable[[Callable[[], WorkerSnapshot], str], Awaitable[_Closeable]],
    ready: Callable[[dict[str, Any]], None],
    stop: asyncio.Event,
    leave: asyncio.Event,
) -> None:
    """Run a worker until it ends by itself, ``stop`` is set, or ``leave`` is and its tasks run elsewhere.

    Args:
        host: where it listens; empty: where it reaches the coordinator.
        advertise: the address that others use; empty: see :mod:`~minishuffle.wire.advertised`.
        coordinator: where it is at first; for the arguments not listed see :class:`UnregisteredWorker`.
        web: starts the metrics server (snapshot, host); ``ready`` is called once registered.

    Raises:
        ShuffleError: its certificate is for others, it could not register, or it lost its coordinator.
    """
    tune_interpreter(settings.switch_interval, lets_tasks_finish=settings.loop_lets_tasks_finish)
    host = await _listening_host(host, advertise, coordinator, tls)
    start = UnregisteredWorker(settings, cluster, secret, spool_directory, find, record=record, tls=tls)
    forms: list[UnregisteredWorker | Worker] = [start]  # the last is what the process is by now
    data_port, server = await start.endpoint.listen(host), await web(lambda: forms[-1].snapshot(), host)

    async def serve() -> None:
        identity = Identity(Role.WORKER, cluster, requested_worker, 0)
        control = await _connect(coordinator, identity, secret, tls, advertise or host)
        request = registration(
            settings,
            start.pool,
            host=host,
            advertise=advertise,
            data_port=data_port,
            metrics_port=server.port,
            requested_worker=requested_worker,
            standby=standby,
            end_is_told=record.is_read,
        )
        registered = await register(start, control, request, coordinator, forms.append)
        ready(request.model_dump(include=READY) | registered.model_dump(include=READY))
        if reason := await start.ended:
            raise PeerLost(reason)

    try:
        await _until_ended(serve(), start, lambda: forms[-1].leave(), stop, leave)
    finally:
        await forms[-1].close()
        await server.close()


async def _connect(
    coordinator: Address, identity: Identity, secret: bytes, tls: Credentials | None, host: str
) -> ControlLink:
    """A control link of a worker that others reach at ``host``, which may stand for all addresses: then they
    use the one that the coordinator sees.

    Raises:
        UsageError: the certificate is not for that address.
        ShuffleError: there is none.
    """
    link = await connect_control(coordinator, identity, secret, timeout=COORDINATOR_SECONDS_MAX, tls=tls)
    if tls is not None and is_wildcard(host):
        try:
            tls.check_host(Address.parse(link.local).host)
        except UsageError:
            link.close()
            raise
    return link


async def _until_ended(
    serve: Coroutine[None, None, None],
    start: UnregisteredWorker,
    begin_to_leave: Callable[[], None],
    stop: asyncio.Event,
    leave: asyncio.Event,
) -> None:
    """Serve until that ends, or until ``stop`` is set, or the worker has left: in any case it ends by itself.
    Raises what serving raises before."""

    async def leaving() -> None:
        await leave.wait()
        begin_to_leave()
        await start.ended

    tasks = [asyncio.create_task(each) for each in (serve, stop.wait(), leaving())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set() and not leave.is_set():
            await tasks[0]
    finally:
        start.record.leave()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listening_host(host: str, advertise: str, coordinator: Address, tls: Credentials | None) -> str:
    """``host``, or the address by which a worker that was given none reaches the coordinator.

    Raises:
        UsageError: the certificate is not for the address that others use.
    """
    host = host or await _near(coordinator)
    if tls is not None:
        tls.check_host(advertise or host)
    return host


async def _near(coordinator: Address) -> str:
    """Where a worker listens that was not told where: on loopback if the coordinator is there."""
    near = is_loopback(coordinator.host)
    return LOOPBACK if near else await address_toward(coordinator.host) or LOOPBACK
