"""What ranks do whose collectives do not match, several times over: who returns, who waits, and with which values.

    python benchmarks/unequal_collectives.py [--ranks 4] [--runs 5] [--json FILE]

`hang`: rank 0 alone launches a broadcast before the barrier of all. `dtypes`: rank 0 sums int32, the others float32.
On GPUs if there is one for each rank, else on gloo. Lesson 10 shows both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.result import tell  # noqa: E402
from workbench import WorkbenchError, current_world, ranks  # noqa: E402


def hang(folder: Path) -> None:
    loss = torch.ones(4, device=current_world().device)
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        dist.broadcast(loss, 0)  # only rank 0 comes here
    dist.barrier()
    torch.ones(1, device=current_world().device).item()
    (folder / str(dist.get_rank())).write_text(str(loss.tolist()), encoding="utf-8")


def dtypes(folder: Path) -> None:
    mixed = torch.ones(2, dtype=torch.float32 if dist.get_rank() else torch.int32, device=current_world().device)
    dist.all_reduce(mixed)
    (folder / str(dist.get_rank())).write_text(str(mixed.tolist()), encoding="utf-8")


def observed(call: Callable[[Path], None], size: int) -> dict[str, Any]:
    """One run on new ranks: what each rank held when it returned, and the report where one did not, or differed."""
    with tempfile.TemporaryDirectory() as name, ranks(size, echo="none") as pool:
        pool.run(dist.barrier)  # the ranks have started, and their group with them
        pool.timeout = 2.0
        report = ""
        try:
            pool.run(call, Path(name))
            pool.refuse_divergence()
        except WorkbenchError as error:
            report = "\n\n".join(str(error).split("\n\n")[:2])  # without the stacks
        return {"what": call.__name__, "backend": pool.backend, "report": report,
                "returned": {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(name).iterdir())}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [observed(call, options.ranks) for call in (hang, dtypes) for _ in range(options.runs)]
    command = f"python benchmarks/unequal_collectives.py --ranks {options.ranks} --runs {options.runs}"
    tell(command, {"runs": runs}, options.json)


if __name__ == "__main__":
    main()
