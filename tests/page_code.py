"""Run a view's JavaScript by node, to compare the page with Python."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[1] / "workbench/notebook/views/js/src/moments"


def answer_of(module: str, code: str, given: object) -> Any:
    """What the statements `code` print as JSON, which find `simulate` and `moved` of a module, and `given`."""
    if shutil.which("node") is None and "CI" not in os.environ:
        pytest.skip("no node on this machine: apt-get install nodejs")
    program = (f'import {{ simulate, moved }} from "{SOURCES / module}"; import {{ readFileSync }} from "fs";'
               f"const given = JSON.parse(readFileSync(0)); {code}")
    done = subprocess.run(["node", "--input-type=module", "-e", program], input=json.dumps(given), text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
