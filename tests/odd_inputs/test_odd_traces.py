"""Odd traces of a profiler are read, or refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from odd import damaged, holds, is_a_sentence
from test_odd_files import odd

from workbench.cli import main
from workbench.lab.traces import read_order

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def _trace() -> dict[str, Any]:
    parts = [("kernel", "gemm", 0, 50, {"device": 0, "stream": 7, "correlation": 1}),
             ("cuda_runtime", "cudaLaunchKernel", -9, 2, {"correlation": 1}),
             ("kernel", "ncclDevKernel_AllGather", 40, 30, {
                 "device": 0, "stream": 20, "correlation": 2, "Collective name": "all_gather", "In msg nelems": 64,
                 "dtype": "Float", "Group size": 2}),
             ("cuda_runtime", "cudaGraphLaunch", -5, 2, {"correlation": 2}),
             ("gpu_memcpy", "Memcpy PtoP", 80, 9, {"device": 0, "stream": 21, "correlation": 3}),
             ("user_annotation", "ProfilerStep#1", -10, 60, {}), ("user_annotation", "ProfilerStep#2", 51, 60, {})]
    return {"traceEvents": [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 1, "args": a}
                            for cat, name, ts, dur, a in parts],
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "distributedInfo": {"rank": 0, "world_size": 2}}


def test_an_odd_trace_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "trace.json", tmp_path / "order.json"

    def check(text: bytes, packed: bool, options: list[str]) -> None:
        out.unlink(missing_ok=True)
        file = path.with_suffix(".json.gz") if packed else path
        file.write_bytes(text)
        capsys.readouterr()
        status = main(["order", str(file), "--json", str(out), *options])
        printed, said = capsys.readouterr()
        assert status in (0, 2) and out.exists() == (status == 0)
        if status:
            is_a_sentence(said, str(file))
        else:
            steps = json.loads(out.read_text())["steps"]
            assert steps and "traced on" in printed
            order = read_order([file], *options[1:])
            assert all(order.timeline(i).spans is not None for i in range(len(steps)))

    sound = _trace()
    packed = damaged(gzip.compress(json.dumps(sound).encode()))
    options = st.sampled_from([[], [], ["--step", "1"], ["--step", "x"]])
    holds(10_000, lambda given, more: check(*given, more), st.one_of(
        st.tuples(odd(sound), st.just(False)), st.tuples(odd(sound).map(gzip.compress), st.just(True)),
        st.tuples(packed, st.just(True)), st.tuples(odd(sound), st.just(True))), options)
