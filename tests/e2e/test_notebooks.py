"""Real kernels: the notebook that is shipped, an interrupt, and a kernel that is killed.

Jupyter is imported where it is used: it is in the lock of documents, not in that of the other tests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minishuffle import examples
from support.waiting import until

from .conftest import runs

pytestmark = [pytest.mark.extra, pytest.mark.slow, pytest.mark.timeout(150)]

NOTEBOOK = Path(examples.__file__).with_name("first_hour.ipynb")
SECONDS_MAX = 60
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
START = """
from minishuffle import LocalCluster, Stream
cluster = LocalCluster(workers=1).start()
print(*cluster.workers.values())
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels write goes nowhere else; the event loop that Jupyter keeps for this thread is closed."""
    from jupyter_core.utils import ensure_event_loop

    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    yield
    ensure_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture
def kernel(own_folders: None) -> Iterator[Any]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager.start_kernel()
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
        manager.context.term()


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """What outputs are as text, the last state of those that change."""
    found = [each.get("text") or each.get("data", {}).get("text/plain") or each["ename"] for each in outputs]
    return [PORT.sub("PORT", text if isinstance(text, str) else "".join(text)) for text in found]


def test_the_notebook_gives_what_stands_in_it() -> None:
    import nbclient
    import nbformat

    committed = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    ran = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(ran, timeout=SECONDS_MAX, kernel_name="python3").execute()
    cells = [cell for cell in committed["cells"] if cell["cell_type"] == "code"]
    again = [cell for cell in ran["cells"] if cell["cell_type"] == "code"]
    assert [texts(cell["outputs"]) for cell in again] == [texts(cell["outputs"]) for cell in cells]


def test_an_interrupt_cancels_and_a_killed_kernel_leaves_no_process(kernel: Any) -> None:
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS_MAX)

        def messages(code: str) -> Iterator[dict[str, Any]]:
            sent = client.execute(code)
            while True:
                message = client.get_iopub_msg(timeout=SECONDS_MAX)
                if message["parent_header"].get("msg_id") != sent:
                    continue
                if message["content"].get("execution_state") == "idle":
                    return
                if message["msg_type"] in ("stream", "display_data", "update_display_data", "error"):
                    yield message["content"]

        [pids] = texts(list(messages(START)))
        shown = messages("cluster.run(Stream.generate(rate=100).to_count())")
        until(lambda: texts([next(shown)]) == ["job j1 (job): running"], "the job runs")
        kernel.interrupt_kernel()
        assert texts(list(shown))[-1] == "KeyboardInterrupt"
        over = texts(list(messages("print(cluster.client.handle('j1').wait_until_over(30).state)")))
        assert over == ["job j1 (job): canceled", "canceled\n"]
    finally:
        client.stop_channels()
    kernel.shutdown_kernel(now=True)
    until(lambda: not any(map(runs, map(int, pids.split()))), "the cluster ends with the kernel")
