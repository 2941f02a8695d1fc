"""Pools and channels of tasks: each worker serves its own, and the coordinator asks all that run a job."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Final

import aiohttp
from pydantic import BaseModel, ValidationError

from minishuffle.counters import GateSnapshot, PartitionSnapshot, WorkerSnapshot
from minishuffle.ids import Address

__all__ = ["BUFFERS_PATH", "JobBuffers", "WorkerBuffers", "asked_workers", "worker_buffers"]

BUFFERS_PATH: Final = "/api/v1/buffers"
ANSWER_SECONDS_MAX: Final = 1.0
"""A worker that takes longer counts as silent; the next request asks it again."""


class TaskBuffers(BaseModel):
    """The input gates and result partitions of one attempt; each is summed over its channels."""

    job: str
    operator: int
    name: str
    index: int
    attempt: int
    worker: int
    gates: list[GateSnapshot]
    partitions: list[PartitionSnapshot]


class WorkerBuffers(BaseModel):
    """All tasks of one worker."""

    tasks: list[TaskBuffers]


class JobBuffers(BaseModel):
    """All tasks of one job; ``silent`` are workers that did not answer."""

    tasks: list[TaskBuffers]
    silent: list[int]


def worker_buffers(snapshot: WorkerSnapshot) -> WorkerBuffers:
    """The buffers of a worker, as it serves them."""
    tasks = [
        TaskBuffers(
            job=task.job,
            operator=task.operator,
            name=task.name,
            index=task.index,
            attempt=task.attempt,
            worker=snapshot.worker,
            gates=list(task.gates),
            partitions=list(task.partitions),
        )
        for task in snapshot.tasks
    ]
    return WorkerBuffers(tasks=tasks)


async def asked_workers(
    session: aiohttp.ClientSession,
    workers: Iterable[tuple[int, Address]],
    job: str,
    tls: ssl.SSLContext | None = None,
) -> JobBuffers:
    """The buffers of a job on the workers at these addresses, which are asked in parallel, with ``tls`` over
    HTTPS."""
    scheme, how = ("http", True) if tls is None else ("https", tls)

    async def ask(address: Address) -> WorkerBuffers | None:
        try:
            async with session.get(f"{scheme}://{address}{BUFFERS_PATH}", ssl=how) as response:
                response.raise_for_status()
                return WorkerBuffers.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValidationError):
            return None

    places = list(workers)
    answers = await asyncio.gather(*(ask(address) for _, address in places))
    tasks = [task for answer in answers if answer is not None for task in answer.tasks if task.job == job]
    silent = [number for (number, _), answer in zip(places, answers, strict=True) if answer is None]
    return JobBuffers(tasks=sorted(tasks, key=lambda task: (task.operator, task.index)), silent=silent)
