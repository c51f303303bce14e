"""What `torchfrtrace`, torch's own reader of flight records, says about a hang."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workbench.errors import WorkbenchError
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import RankError

VERSION = "2.10"
KEPT = ("Not all ranks", "Collective sequence", "group info", "collective:", "missing ranks", "expected ranks",
        "error msg")


def torchfrtrace(error: RankError) -> str:
    """Its findings about the collectives in `error`, each shortened to the lines in `KEPT`.

    It stops at gloo's own dump, which has no `pg_config` with the ranks of each group, as NCCL's has. So each rank's
    records are written to a file with one. Outputs count as inputs: right for all-reduces, broadcasts and barriers.
    """
    with TemporaryDirectory() as folder:
        for rank, own in error.launches.items():
            groups = {each.group: each for launches in error.launches.values() for each in launches
                      if rank in each.ranks}
            config = {name: {"name": name, "desc": each.axis, "ranks": str(list(each.ranks))}
                      for name, each in groups.items()}
            dump = {"version": VERSION, "pg_config": config, "entries": [_entry(each) for each in own]}
            Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(dump))
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "rank_", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkbenchError(f"torchfrtrace failed: {done.stderr.strip().splitlines()[-1]}")
    findings: list[list[str]] = []  # it reads the files in the folder's order, which is none
    for line in done.stderr.splitlines():
        if line.startswith(KEPT[:2]):
            findings.append([])
        if line.startswith(KEPT) and findings:
            findings[-1].append(line.rstrip())
    return "\n\n".join(sorted("\n".join(lines) for lines in findings))


def _entry(launch: Launch) -> dict[str, Any]:
    """A record as torch dumps it, without times and stack."""
    sizes = [list(shape) for shape in launch.shapes]
    types = [name.capitalize() for name in launch.dtypes]
    return {"record_id": launch.record, "process_group": (launch.group, launch.axis), "pg_id": 0, "op_id": 1,
            "collective_seq_id": launch.number, "p2p_seq_id": 0, "profiling_name": f"gloo:{launch.op}",
            "input_sizes": sizes, "output_sizes": sizes, "input_dtypes": types, "output_dtypes": types,
            "state": "scheduled", "time_created_ns": 0, "retired": launch.done, "is_p2p": False, "frames": []}
