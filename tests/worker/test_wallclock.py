"""The wall clock of a worker, while somebody sets that of the system."""

from __future__ import annotations

import pytest

from minishuffle.worker import wallclock
from minishuffle.worker.wallclock import WallClock


class Host:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.wall, self.up = 1_700_000_000.0, 100.0
        self.held_up: list[float] = []
        """Between the next readings of both clocks."""

    def time(self) -> float:
        if self.held_up:
            self.passes(self.held_up.pop(0))
        return self.wall

    def monotonic(self) -> float:
        return self.up

    def passes(self, seconds: float) -> None:
        self.wall, self.up = self.wall + seconds, self.up + seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(wallclock, "time", made)
    return made


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_it_goes_on_when_the_system_clock_is_set(host: Host, step: float) -> None:
    clock = WallClock()
    assert (clock(), clock.lead(), clock.take_steps()) == (1_700_000_000.0, 0.0, [])
    host.wall += step
    host.passes(1.0)
    assert clock() == pytest.approx(1_700_000_001.0, abs=0.0101)
    assert clock.lead() == pytest.approx(step, abs=0.0101)
    assert clock.take_steps() == [pytest.approx(step)]


def test_a_thread_that_is_held_up_between_both_clocks_reads_them_again(host: Host) -> None:
    clock = WallClock()
    host.held_up = [5.0]
    assert clock() == 1_700_000_005.0
    assert clock.take_steps() == []
