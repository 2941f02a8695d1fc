"""What a job says of links that it needs; what follows is in ``test_links``."""

from __future__ import annotations

from minishuffle.coordinator.jobs.history import History
from minishuffle.coordinator.jobs.joblinks import JobLinks


def test_a_link_is_noted_once_when_it_breaks_and_once_when_it_is_there() -> None:
    history = History()
    links = JobLinks(history)
    assert links.set_broken({(1, 2): "a", (1, 3): "b"}, 1.0, 0.0)
    assert not links.set_broken({(1, 2): "later", (1, 3): "b"}, 2.0, 0.0)
    assert links.set_broken({(1, 3): "b", (2, 3): "c"}, 3.0, 0.0)
    assert [(info.workers, info.text) for info in links.infos()] == [([1, 3], "b"), ([2, 3], "c")]
    links.forget(2)
    assert list(links.broken) == [(1, 3)]
    assert [(event.at, event.kind) for event in history.last_events(9)] == [
        (1.0, "link broken"),
        (1.0, "link broken"),
        (3.0, "link broken"),
        (3.0, "link restored"),
    ]
