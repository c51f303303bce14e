"""Load the code of an artifact in a process of its own, as a rank does, and end: that builds the kernels that it takes.

    python -m workbench.tools.export.load_once FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.pipeline.machine import gpus
from workbench.tools.export.artifact import read_code


def load_once(folder: Path) -> None:
    """Run the code of every program, which defines its functions and calls none."""
    for file in sorted((folder / "code").glob("*.py")):
        read_code(folder, file.stem).function(file, 0 if gpus() else None)


if __name__ == "__main__":
    load_once(Path(sys.argv[1]))
