"""Docstrings as Markdown for the site: Sphinx's roles become code, and ``::`` before code a colon."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`~?([^`]+)`")


class AsMarkdown(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(
                r"`\1`", re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
            )
