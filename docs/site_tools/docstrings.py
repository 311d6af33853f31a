# SPDX-License-Identifier: Apache-2.0
"""What the docstrings of this package look like on a page: names with their texts in columns become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w[\w./*]*(?:, \w+)*) {2,}(\S.*)$")


class Columns(griffe.Extension):
    """`name   what it is`, whose further lines are indented, becomes `- **name**: what it is`."""

    def on_object(self, *, obj: griffe.Object, **keywords: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if (entry := ENTRY.match(line)) is not None:
            if not inside and lines and lines[-1].strip():
                lines.append("")
            lines.append(f"- **`{entry[1]}`**: {entry[2]}")
            inside = True
        elif inside and line.startswith("   ") and line.strip():
            lines[-1] += " " + line.strip()
        else:
            if inside and line.strip():
                lines.append("")
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines)
