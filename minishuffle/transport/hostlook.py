"""Whether the kernel of a host answers, whatever its processes do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from minishuffle import limits
from minishuffle.ids import Address
from minishuffle.transport.forks import close_in_forks

__all__ = ["host_answers"]


async def host_answers(addresses: Sequence[str], times: int, seconds: float) -> bool | None:
    """Dial these ports of one host, ``times`` times at equal intervals, for ``seconds`` in all; longer if
    this process is held up, since each try has its time.

    A kernel completes connections to a port whose process is stopped or busy, from its listen backlog, and
    refuses connections to a port without a listener. An error of this host's own kernel, such as no route to
    the host, does not count as an answer. No address is looked up: all are numbers.

    Returns:
        True as soon as there is an answer; False if there is none; None if this process was held up
            meanwhile, so that an unread answer may be in its sockets, or if it can open no sockets.
    """
    loop = asyncio.get_running_loop()
    ports, begun = list(map(Address.parse, addresses)), loop.time()
    dials: set[asyncio.Task[bool]] = set()
    try:
        for _ in range(times):
            dials |= {loop.create_task(_dial(each), name=f"look at {each}") for each in ports}
            until = loop.time() + seconds / times
            while (left := until - loop.time()) > 0:
                waiting = [dial for dial in dials if not dial.done()]
                if not waiting:
                    await asyncio.sleep(left)  # this host's kernel reports no route; the next try may differ
                    break
                await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if any(dial.done() and dial.result() for dial in dials):
                    return True
        return None if loop.time() - begun > seconds + limits.HOST_LOOK_LATE_SECONDS_MAX else False
    except OSError:  # There is no descriptor left for a socket.
        return None
    finally:
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)


async def _dial(address: Address) -> bool:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as tried:
        close_in_forks(tried)
        try:
            await loop.sock_connect(tried, (address.host, address.port))
        except ConnectionError:  # It is refused.
            return True
        except OSError:
            return False
    return True
