"""The committed ES module is what its sources and its lock file make, and it needs no network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "workbench" / "notebook" / "views"


@pytest.mark.nightly
def test_the_committed_module_is_what_npm_builds(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine: apt-get install npm")
    shutil.copytree(ROOT / "js", tmp_path / "js", ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "static").mkdir()
    for step in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
        done = subprocess.run(step, cwd=tmp_path / "js", capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    built = (tmp_path / "static" / "views.js").read_bytes()
    assert built == (ROOT / "static" / "views.js").read_bytes(), "run `npm ci && npm run build` in js/"


def test_nothing_in_it_loads_from_elsewhere():
    source = (ROOT / "static" / "views.js").read_text(encoding="utf-8")
    assert not re.search(r"""\b(fetch|XMLHttpRequest|importScripts|WebSocket)\s*\(|\bimport\s*\(\s*["']http""", source)
    assert not re.search(r"""(src|href)\s*=\s*["']https?:""", source)
    assert "Permission is hereby granted" in source or "MIT" in source  # the licences of what is bundled
