"""Ranks as forks: fast after the first, of the right parent, environment and folder, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from processes import SOON, alive, wait_until_gone

from workbench.errors import WorkbenchError
from workbench.world import template
from workbench.world.local import prepare
from workbench.world.ranks import ranks

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def own():
    """The template of this process, which one pool has started."""
    ranks(1, backend="gloo", echo="none").close()
    return template._TEMPLATES[0]


def seen():
    return {"parent": os.getppid(), "folder": os.getcwd(), "late": os.environ.get("WORKBENCH_LATE"),
            "random": random.random(), "in": [os.fstat(0).st_rdev, os.getpgrp()]}


def test_the_next_pool_forks_the_same_template(own, monkeypatch):
    fork, forked = template.Template.fork, []
    monkeypatch.setattr(template.Template, "fork", lambda *args: forked.append(fork(*args)) or forked[-1])
    with ranks(2, backend="gloo", echo="none") as pool:
        assert pool.pids == [rank.pid for rank in forked]
        assert alive(own.pid) and own.pid not in pool.pids
    assert [own] == template._TEMPLATES


def test_a_rank_is_this_process_s_child_in_its_folder_with_what_is_set_now(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_LATE", "set after the template started")
    with ranks(2, backend="gloo", echo="none") as pool:
        found = pool.run(seen)
        assert [each["in"] for each in found] == [[os.stat(os.devnull).st_rdev, pid] for pid in pool.pids]
    for each in found:
        assert each["parent"] == os.getpid() and each["folder"] == str(tmp_path)
        assert each["late"] == "set after the template started"
    assert found[0]["random"] != found[1]["random"]
    assert [own] == template._TEMPLATES


def test_ranks_with_variables_of_their_own_or_cuda_are_no_forks(monkeypatch):
    assert template.suits("gloo", {})
    assert not template.suits("nccl", {}) and not template.suits("gloo", {"TORCH_LOGS": "aot"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not template.suits("gloo", {})


def test_an_exit_status_and_a_signal_are_told_as_of_any_child(own):
    with ranks(2, backend="gloo", echo="none", timeout=10) as pool:
        for what, said in ((3, "exited with code 3"), (-9, "SIGKILL")):
            with pytest.raises(WorkbenchError, match=said):
                pool.run(end_of_one, what)


def end_of_one(what):
    if os.environ["RANK"] == "1":
        if what > 0:
            os._exit(what)
        os.kill(os.getpid(), -what)
    time.sleep(60)


@pytest.mark.nightly
def test_kill_9_of_the_owner_ends_the_template_and_the_ranks(tmp_path):
    script = ("from workbench.world import template\nfrom workbench.world.ranks import ranks\nimport time\n"
              "pool = ranks(2, backend='gloo')\nprint(template._TEMPLATES[0].pid, *pool.pids, flush=True)\n"
              "time.sleep(60)")
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3 and all(map(alive, pids))
    owner.kill()
    owner.communicate()
    assert wait_until_gone(pids) == []
    assert not list(Path(tmp_path).glob("workbench-ranks-*"))


@pytest.mark.nightly
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="where CUDA may be, ranks are no forks")
def test_load_ext_begins_the_imports_and_the_first_pool_forks_that_template(tmp_path):
    script = ("import os, time\nos.environ.pop('TORCHINDUCTOR_CACHE_DIR', None)\nimport workbench\n"
              "from IPython.core.interactiveshell import InteractiveShell\n"
              "workbench.load_ipython_extension(InteractiveShell.instance())\n"
              "from workbench.world import template\nfrom workbench.world.ranks import ranks\n"
              "early, = template._TEMPLATES\nimport torch\n"
              "for size in (1, 4):\n"  # they have other shares of the threads
              "    with ranks(size, backend='gloo', echo='none') as pool:\n"
              "        assert template._TEMPLATES == [early]\n"
              "        print(*pool.run(torch.get_num_threads), *pool.run(os.getenv, 'TORCHINDUCTOR_CACHE_DIR'))\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "IPYTHONDIR": str(tmp_path)}
    env.pop("OMP_NUM_THREADS", None)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)
    assert found.returncode == 0, found.stderr
    cores = len(os.sched_getaffinity(0))
    for line, size in zip(found.stdout.splitlines(), (1, 4), strict=True):
        assert line.split()[:size] == [str(max(1, cores // size))] * size
        assert len(set(line.split()[size:])) == 1 and "torchinductor" in line.split()[size]


@pytest.mark.parametrize(("said", "threads"), [("3", 3), (" 2 , 1", 2)])
def test_a_rank_has_the_threads_that_the_environment_says_now(own, monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    with ranks(1, backend="gloo", echo="none") as pool:
        assert pool.run(threads_here) == [(threads, said)]
    assert [own] == template._TEMPLATES


def threads_here():
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("said", ["", "many", "0", "²"])
def test_a_number_of_threads_that_is_none_is_left_to_torch(monkeypatch, said):
    monkeypatch.setattr("torch.set_num_threads", lambda n: pytest.fail(f"{said!r} was taken for {n}"))
    template._set_threads(said)


def test_all_modules_are_looked_at():
    found = template._files()
    assert any(name.endswith("workbench/pipeline/run.py") for name in found)
    assert any(name.endswith("workbench/authoring/models/llama3.py") for name in found)


def drawn():
    import torch

    return torch.rand(1).item(), sys.modules["numpy"].random.rand(), random.random()


def test_ranks_draw_their_own_numbers_in_every_pool(own):
    found = []
    for _ in range(2):
        with ranks(2, backend="gloo", echo="none") as pool:
            found += pool.run(drawn)
    assert all(len(set(numbers)) == 4 for numbers in zip(*found, strict=True))


def test_an_interrupt_between_two_forks_leaves_no_rank(own, monkeypatch):
    fork, made = template.Template.fork, []

    def once(self, *args):
        if made:
            raise KeyboardInterrupt
        made.append(fork(self, *args))
        return made[0]

    monkeypatch.setattr(template.Template, "fork", once)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ranks(2, backend="gloo", echo="none")
    assert time.monotonic() - begun < SOON and made[0].returncode == -signal.SIGKILL
    assert not alive(made[0].pid)


def writes_at_its_end(path):
    import threading

    threading.Thread(target=lambda: (time.sleep(1), path.write_text("written"))).start()


def test_a_rank_waits_for_the_threads_of_its_calls(own, tmp_path):
    with ranks(1, backend="gloo", echo="none") as pool:
        pool.run(writes_at_its_end, tmp_path / "late")
    assert (tmp_path / "late").read_text() == "written"


def test_a_rank_has_the_cpus_and_the_mask_of_files_of_now(own, monkeypatch):
    cpus, mask = os.sched_getaffinity(0), os.umask(0o077)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        with ranks(1, backend="gloo", echo="none") as pool:
            assert pool.run(place) == [({min(cpus)}, 0o077)]
    finally:
        os.sched_setaffinity(0, cpus)
        os.umask(mask)
    assert [own] == template._TEMPLATES


def place():
    return os.sched_getaffinity(0), os.umask(0)


def test_an_editors_link_to_nowhere_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "pool.py").touch()
    (tmp_path / "world" / ".#pool.py").symlink_to("nowhere")
    monkeypatch.setattr(template, "__file__", str(tmp_path / "world" / "template.py"))
    assert list(template._files()) == [str(tmp_path / "world" / "pool.py")]


# from here on templates end: each costs seconds, so all that one serves comes before


@pytest.mark.nightly
def test_what_an_import_may_read_takes_another_template(own, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "-all")
    with ranks(1, backend="gloo", echo="none") as pool:
        assert pool.run(os.getenv, "TORCH_LOGS") == ["-all"]
    assert [own] != template._TEMPLATES and not alive(own.pid)


@pytest.mark.nightly
def test_a_template_that_was_killed_is_replaced_and_its_ranks_live_on(own):
    with ranks(1, backend="gloo", echo="none") as pool:
        pids = pool.pids
        os.kill(own.pid, signal.SIGKILL)
        assert wait_until_gone([own.pid]) == []
        assert pool.run(os.getpid) == pids
        with ranks(1, backend="gloo", echo="none") as second:
            assert second.run(os.getpid) == second.pids
    assert [own] != template._TEMPLATES


@pytest.mark.nightly  # quick: test_what_an_import_may_read_takes_another_template
def test_an_edited_module_takes_another_template(own, monkeypatch):
    later = {name: written + 1 for name, written in template._files().items()}
    monkeypatch.setattr(template, "_files", lambda: later)
    with ranks(1, backend="gloo", echo="none") as pool:
        assert pool.run(os.getpid) == pool.pids
    assert [own] != template._TEMPLATES and not alive(own.pid)


@pytest.mark.nightly
def test_a_template_that_cannot_import_torch_says_why(tmp_path, monkeypatch):
    (tmp_path / "pydantic.py").write_text("raise RuntimeError('a broken installation')")
    monkeypatch.syspath_prepend(tmp_path)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkbenchError, match=r"(?s)imports torch for them ended with status 1:\n.*a broken install"):
        ranks(2, backend="gloo")
    assert template._TEMPLATES == [] and len(os.listdir("/proc/self/fd")) <= fds


def test_a_template_that_imports_for_too_long_is_ended(monkeypatch):
    template.end()
    monkeypatch.setattr(template, "START_SECONDS", 0.05)
    with pytest.raises(WorkbenchError, match=r"imports torch for them has not done so in 0\.05 s$"):
        ranks(2, backend="gloo")
    assert template._TEMPLATES == []


def test_nothing_is_prepared_where_ranks_are_no_forks(monkeypatch):
    template.end()
    monkeypatch.setattr("workbench.world.local.Path.exists", lambda self: True)  # a driver of NVIDIA's
    prepare()
    assert template._TEMPLATES == []


@pytest.mark.nightly
def test_a_folder_made_after_the_template_started_can_be_imported_from(tmp_path, monkeypatch):
    folder = tmp_path / "later"
    monkeypatch.syspath_prepend(folder)
    prepare()
    ranks(1, backend="gloo", echo="none").close()
    folder.mkdir()
    (folder / "made_later.py").write_text("value = 1")
    with ranks(1, backend="gloo", echo="none") as pool:
        assert pool.run(eval, "__import__('made_later').value") == [1]


@pytest.mark.nightly
def test_imports_that_print_much_do_not_stop_a_template(monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # some 200 KB
    with ranks(1, backend="gloo", echo="none") as pool:
        assert pool.run(os.getpid) == pool.pids
