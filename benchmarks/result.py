"""What a benchmark found: its command, the machine and the versions, and its figures, printed and kept as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.pipeline.machine import machine, versions


def tell(command: str, figures: dict[str, Any], target: Path | None) -> None:
    """Print the result, and write it to `target` where there is one."""
    text = json.dumps({"command": command, "machine": machine(), "versions": versions(), **figures}, indent=1)
    print(text)
    if target is not None:
        target.write_text(text + "\n", encoding="utf-8")
