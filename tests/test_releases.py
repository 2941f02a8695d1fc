"""Which versions go together, and what is said of those that do not."""

from __future__ import annotations

import platform

import pytest

from minishuffle.errors import UsageError
from minishuffle.releases import compared_releases, releases_here, require_same_release

HERE = {
    "python": "3.11.7",
    "minishuffle": "0.2.0",
    "cloudpickle": "3.1.0",
    "numpy": "2.1.0",
    "pyarrow": "18.1.0",
}


def test_what_this_process_has() -> None:
    here = releases_here()
    assert set(here) == set(HERE)
    assert here["python"] == platform.python_version()
    assert compared_releases(here, {1: here, 2: here}) == ""


def test_nothing_is_said_of_the_same_or_of_what_is_not_known() -> None:
    assert compared_releases(HERE, {1: HERE, 2: {}, 3: {"numpy": "2.1.0"}}) == ""
    assert compared_releases({}, {1: HERE}) == ""
    assert compared_releases(HERE, {}) == ""


def test_differences_are_a_table_of_each_side() -> None:
    others = {2: HERE, 10: HERE | {"pyarrow": "21.0.0"}, 1: HERE | {"python": "3.11.9"}}
    assert compared_releases(HERE, others).splitlines() == [
        "workers have other versions than this program of what its functions may use",
        "              python  pyarrow",
        "this program  3.11.7  18.1.0",
        "worker 1      3.11.9  18.1.0",
        "worker 2      3.11.7  18.1.0",
        "worker 10     3.11.7  21.0.0",
    ]


def test_workers_that_have_the_same_are_one_line() -> None:
    others = {number: HERE | {"numpy": "2.2.0" if number > 2 else "2.1.0"} for number in range(1, 501)}
    assert compared_releases(HERE, others).splitlines()[1:] == [
        "                              numpy",
        "this program                  2.1.0",
        "workers 1, 2                  2.1.0",
        "workers 3, 4, 5 and 495 more  2.2.0",
    ]


@pytest.mark.parametrize(
    ("package", "version", "works"),
    [
        ("minishuffle", "0.2.9", True),
        ("minishuffle", "0.3.0", False),
        ("minishuffle", "1.2.0", False),
        ("cloudpickle", "3.9.0", True),
        ("cloudpickle", "2.2.1", False),
        ("numpy", "2.9.0", True),
        ("numpy", "1.26.4", False),
        ("pyarrow", "14.0.0", True),
    ],
)
def test_what_cannot_be_opened_is_an_error(package: str, version: str, works: bool) -> None:
    workers = {1: HERE, 2: HERE | {package: version}}
    if works:
        assert version in compared_releases(HERE, workers)
    else:
        with pytest.raises(UsageError, match=f"{package} must be of the same release") as caught:
            compared_releases(HERE, workers)
        assert f"worker 2      {version}" in str(caught.value)


def test_a_worker_of_another_minor_is_refused() -> None:
    require_same_release(HERE, "0.2.7")
    require_same_release({}, "0.2.7")
    with pytest.raises(UsageError, match=r"runs minishuffle 0\.2\.0, this cluster 0\.3\.0"):
        require_same_release(HERE, "0.3.0")
