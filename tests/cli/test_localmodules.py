"""Which modules beside a job's file go to the workers: those that it imports anywhere, and theirs."""

from __future__ import annotations

from pathlib import Path

from minishuffle.cli.localmodules import local_modules


def test_modules_are_found_wherever_they_are_imported(tmp_path: Path) -> None:
    files = {
        "job.py": "import helper\ndef build():\n    from pack import inner\n    import json, absent, bad\n",
        "helper.py": "def f():\n    import late\n",
        "late.py": "import helper\n",
        "unused.py": "",
        "bad.py": "def broken(:\n",
        "pack/__init__.py": "",
        "pack/inner.py": "from .deep.down import x\nfrom . import side\n",
        "pack/side.py": "x = 1",
        "pack/deep/__init__.py": "",
        "pack/deep/down.py": "from ..side import x",
        "pack/deep/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = local_modules(tmp_path / "job.py", tmp_path)
    assert set(found) == {
        "helper", "late", "bad", "pack", "pack.inner", "pack.side", "pack.deep", "pack.deep.down"
    }  # fmt: skip
    assert found["pack"].is_package and not found["helper"].is_package
    assert found["late"].text == files["late.py"]
    inner = local_modules(tmp_path / "pack" / "inner.py", tmp_path)
    assert set(inner) == {"pack", "pack.side", "pack.deep", "pack.deep.down"}
