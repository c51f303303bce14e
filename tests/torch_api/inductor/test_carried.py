"""Kernels and code that leave the process that built them: for which GPU, under which name, and where they arrive."""

import json
import re
import sys
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.torch_api.inductor.carried import for_any_gpu, install_kernels, kernels_for, rebuild, text_for_any_gpu

WRITTEN = """
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        stream0 = get_raw_stream(0)
        full = torch.ops.aten.full.default([0], 0, device = device(type='cuda', index=0), pin_memory = False)
        other = empty_strided_cuda((0, 1), (1, 1), torch.float32)
kernel = async_compile.triton('kernel', '''
    triton_meta={'device': DeviceProperties(type='cuda', index=0, cc=90)}
''', device_str='cuda')
"""


def test_code_names_the_gpu_of_its_process_and_kernels_stay_as_they_are() -> None:
    made = for_any_gpu(WRITTEN)
    assert made.count("RANK_GPU") == 4 and "index=RANK_GPU)" in made
    kept = WRITTEN[WRITTEN.index("kernel = "):]
    assert made.endswith(kept) and "empty_strided_cuda((0, 1)" in made and for_any_gpu(made) == made
    lines = "y = rand((2, 4), device='cuda:0')\nkernel.run(x, stream=stream0)  # {0}\n# of process 0\n" + WRITTEN
    other = re.sub(r"(cuda:|stream|index=|Guard\(|device\(|stream\(|of process )0", r"\g<1>1", lines)
    assert other != lines and text_for_any_gpu(other) == text_for_any_gpu(lines)
    assert text_for_any_gpu(lines.replace("(2, 4)", "(2, 5)")) != text_for_any_gpu(lines)


def test_a_kernel_is_loaded_for_the_gpu_of_its_process_and_no_compiler_pool_is_started() -> None:
    from torch._inductor import config
    from torch._inductor.runtime import hints

    kernel = ("from torch._inductor.runtime.hints import DeviceProperties\n"
              "found = DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90)")
    inside: dict[str, hints.DeviceProperties] = {}
    with kernels_for(3):
        exec(kernel, inside)
        assert config.compile_threads == 1
    assert (inside["found"].index, inside["found"].cc) == (3, 90)
    with kernels_for(None):
        exec(kernel, inside)
    assert inside["found"].index == 0 and config.compile_threads != 1


def test_kernels_arrive_where_inductor_and_triton_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried, cache = tmp_path / "kernels", tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for name in ("ab/kernel.so", "cd/chosen.best_config", "triton/HASH/kernel.cubin", "fxgraph/x/graph.json"):
        (carried / name).parent.mkdir(parents=True, exist_ok=True)
        (carried / name).write_text(name)
    group = "triton/HASH/__grp__kernel.json"  # Triton looks for the files of a kernel at the paths that it says
    (carried / group).write_text(json.dumps({"child_paths": {"kernel.cubin": "/where/it/was/built/kernel.cubin"}}))
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / "kernel.so").write_text("of an earlier run")
    install_kernels(carried, 1)
    found = {str(path.relative_to(cache)): path.read_text() for path in cache.rglob("*") if path.is_file()}
    there = "triton/1/HASH"
    assert json.loads(found.pop(f"{there}/__grp__kernel.json")) == {
        "child_paths": {"kernel.cubin": str(cache / there / "kernel.cubin")}}
    assert found == {"ab/kernel.so": "of an earlier run", "cd/chosen.best_config": "cd/chosen.best_config",
                     f"{there}/kernel.cubin": "triton/HASH/kernel.cubin"}


BUILDS = """
import os, pathlib
cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
assert [p.name for p in cache.rglob("*") if p.is_file()] == ["chosen.best_config"]
(cache / "triton" / "NEW").mkdir(parents=True)
(cache / "triton" / "NEW" / "kernel.cubin").touch()
"""


def test_kernels_are_built_again_with_the_chosen_configurations(tmp_path: Path) -> None:
    for name in ("cd/chosen.best_config", "triton/OLD/kernel.cubin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(WorkbenchError, match="cannot be loaded: .*it broke"):
        rebuild(tmp_path, [sys.executable, "-c", "raise SystemExit('it broke')"])
    rebuild(tmp_path, [sys.executable, "-c", BUILDS])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "cd/chosen.best_config", "triton/NEW/kernel.cubin"]
