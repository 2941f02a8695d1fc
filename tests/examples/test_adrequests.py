"""Requests that follow from their numbers: the same whoever asks, others for another seed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from minishuffle.examples.adrequests import BOUGHT_SHARE, LATEST, AdRequests, timestamps

IDS = np.arange(20_000)


def test_a_request_is_the_same_whoever_asks() -> None:
    requests = AdRequests(100, 900.0, seed=3)
    for column in ("features", "times", "clicked", "click_delays", "bought", "purchase_delays"):
        whole, part = getattr(requests, column)(IDS), getattr(requests, column)(IDS[40:60])
        assert (whole[40:60] == part).all(), column


def test_seeds_and_columns_are_independent_of_each_other() -> None:
    columns = [AdRequests(100, 900.0, seed).uniform(IDS, salt) for seed in (0, 1) for salt in range(16)]
    related = np.abs(np.corrcoef(columns) - np.eye(len(columns)))
    assert related.max() < 0.05


def test_delays_shares_and_campaigns_are_what_they_say() -> None:
    requests = AdRequests(100, 900.0)
    for delays in (requests.click_delays(IDS), requests.purchase_delays(IDS)):
        assert delays.min() >= 0 and 900_000_000 < delays.max() < LATEST * 900_000_000
    assert abs(requests.bought(IDS).mean() - BOUGHT_SHARE) < 0.01
    counts = np.bincount(requests.campaigns(IDS, 10), minlength=10)
    assert len(counts) == 10 and (np.diff(counts) < 0).sum() >= 8 and counts.min() > 0
    assert (np.diff(requests.times(IDS)) == 10_000).all()
    assert timestamps(requests.times(IDS[:1])).type == pa.timestamp("us", "UTC")
