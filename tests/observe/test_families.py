"""The table of metric families."""

from __future__ import annotations

from pathlib import Path

from minishuffle.observe.families import METRICS, RUNTIME_METRICS, USER_METRICS, markdown_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_document_is_the_table() -> None:
    document = (ROOT / "minishuffle" / "observe" / "README.md").read_text(encoding="utf-8")
    _, begin, rest = document.partition("<!-- metrics:begin -->\n")
    table, end, _ = rest.partition("<!-- metrics:end -->")
    assert begin and end, "observe/README.md has no markers around the table of metrics"
    assert table.strip("\n") == markdown_table().strip("\n")


def test_names_and_labels_keep_to_the_conventions() -> None:
    for spec in (*METRICS, *USER_METRICS, *RUNTIME_METRICS):
        assert (spec.type == "counter") == spec.name.endswith("_total"), spec.name
        assert not {"job", "instance", "attempt", "port", "le", "quantile"} & set(spec.labels), spec.name
        assert spec.help, spec.name
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    assert all(name.startswith("minishuffle_") for name in names)
