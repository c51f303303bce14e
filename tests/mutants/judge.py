"""Judge mutants of graphs by every verdict, and note which one caught each.

    python tests/mutants/judge.py    (start it again to go on: it keeps its rows in out/mutants.jsonl)

A mutant stands for what a user's EXACT pass returned. lint, effect, collectives and memory judge it on a fake world of
two ranks; of a mutant on one rank alone, the order of collectives is compared with the original's. What none of them
fails runs on two gloo ranks against its original, bit by bit. A run that raises, or whose ranks crash or hang, counts
as caught by running. What gives the same bits runs on three more inputs: equal there, too, it is equivalent by values;
different there, it is a false PASS.

At the end it writes benchmarks/results/mutants.json, and the rows beside it as CSV. The table of torch 2.13.0 took what
values said of 894 of its mutants from the table before ("earlier" in its last column): 97 others were judged again, and
none otherwise.
"""

import csv
import itertools
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from mutants import running
from mutants.operators import OPERATORS
from mutants.reasons import DEFAULT, reason, why_survived
from mutants.subjects import NAMES, PARTS, Subject, subject

from workbench import Outcome, fake_world
from workbench.world.ranks import RankError, RankPool, ranks

ROOT = Path(__file__).resolve().parents[2]
SEED = 25
MUTANTS = 2700
LEAST, LEAST_EACH = 0.99, 0.95  # of all mutants that are not equivalent, and of those of each operator
ALONE = 0.25  # of the mutants that change what a rank computes: planted on one rank
SECONDS = 30.0  # of a run on ranks that have the subject
START = 280.0
RESULTS = ROOT / "benchmarks" / "results" / "mutants"
COLUMNS = ("mutant", "touches", "verdict", "fails", "tells", "named by")


def planted(whole: Subject, name: str) -> Iterator[tuple[running.Mutant, Any]]:
    """Mutants of one subject without end: each operator in turn, at places that the seed chooses."""
    nowhere: set[str] = set()
    for number in itertools.count():
        operator = list(OPERATORS)[number % len(OPERATORS)]
        if operator in nowhere:
            continue
        rng = Random(f"{SEED}/{name}/{number}")
        alone = OPERATORS[operator].kind not in ("metadata", "inputs") and rng.random() < ALONE
        for part in rng.sample(PARTS, len(PARTS)):
            mutant = running.Mutant(name, part, operator, f"{SEED}.{number}", "one" if alone else "all")
            made = running.mutate(whole.graph(part), mutant)
            if made is not None:
                yield mutant, made
                break
        else:
            nowhere.add(operator)


def light(whole: Subject, mutant: running.Mutant, made: Any) -> dict[str, Any]:
    """The row of a mutant as far as its structure says. caught: the verdicts that fail it, with their sentences."""
    changed, names, settled = made
    row: dict[str, Any] = {"key": mutant.key, "subject": mutant.subject, "part": mutant.part,
                           "operator": mutant.operator, "kind": OPERATORS[mutant.operator].kind,
                           "ranks": mutant.ranks, "settled": settled, "nodes": names, "caught": {}, "told": {}}
    verdicts, grew = running.structural(whole, mutant, changed)
    for verdict in verdicts:
        check = "ranks" if "index" in verdict.evidence and mutant.ranks == "one" else verdict.check
        if verdict.outcome is Outcome.FAIL:
            row["caught"][check] = verdict.message
        elif verdict.outcome is Outcome.NO_EFFECT:
            row["told"][check] = verdict.message
    if grew:
        row["told"]["memory"] = "an estimate grew"
    return row


def by_values(pool: RankPool, mutant: running.Mutant, row: dict[str, Any], locate: bool) -> None:
    """Add to the row what a run on ranks says."""
    usual = pool.timeout
    try:
        if not pool.pids or pool.run(running.held) != [mutant.subject] * pool.size:
            pool.timeout = START
            pool.run(running.prepare, mutant.subject)
        pool.timeout = SECONDS
        told = pool.run(running.numeric, mutant, row["nodes"], locate)
    except RankError as error:
        if not error.timed_out and all(failure.kind != "died" for failure in error.failures):
            raise RuntimeError(f"{mutant.key}: the judge failed, and not the mutant: {error}") from error
        row["caught"]["running"] = str(error).splitlines()[0]
        return
    finally:
        pool.timeout = usual
    first = told[0]
    row["bisect"] = sorted({name for each in told for name in each.get("bisect", ())})
    if first["outcome"] != "PASS":
        row["caught"]["running" if first["outcome"] == "RAISED" else "numerics"] = first["message"]
    elif any(each["others"] for each in told):
        row["false_pass"] = True


def finish(row: dict[str, Any]) -> dict[str, Any]:
    """Add the verdict that caught the mutant first, and whether its sentence names a touched node."""
    row["by"] = next(iter(row["caught"]), "false PASS" if row.get("false_pass") else "equivalent")
    text = row["caught"].get(row["by"], "")
    row["named"] = running.names_one(text, row["nodes"])
    row["located"] = running.names_one("\n".join(row.get("bisect", ())), row["nodes"])
    return row


def judge(whole: Subject, mutants: Iterable[tuple[running.Mutant, Any]], pool: RankPool | None, *,
          locate: bool = True) -> Iterator[dict[str, Any]]:
    """The row of each mutant of one subject, whose fake world is open. Without a pool, values judge nothing."""
    for mutant, made in mutants:
        row = light(whole, mutant, made)
        if not row["caught"] and pool is not None:
            by_values(pool, mutant, row, locate)
        yield finish(row)


def judged(count: int, pool: RankPool, known: Collection[str]) -> Iterator[dict[str, Any]]:
    """The rows of `count` mutants, as many of each subject, but for those in `known`."""
    for place, name in enumerate(NAMES):
        share = count * (place + 1) // len(NAMES) - count * place // len(NAMES)
        with fake_world(2) as world:
            whole = subject(name, world)
            mutants = itertools.islice(planted(whole, name), share)
            yield from judge(whole, (m for m in mutants if m[0].key not in known), pool)


def go_on(path: Path, count: int, pool: RankPool) -> Iterator[dict[str, Any]]:
    """Judge the mutants that the file does not hold yet: each is written as soon as it is judged."""
    known = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in known), encoding="utf-8")  # without a torn last line
    with path.open("a", encoding="utf-8") as file:
        for row in judged(count, pool, {row["key"] for row in known}):
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that a run has written so far; a last line that a kill has torn is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Planted, caught by which verdict first, told of, equivalent, false PASS, and the share of the others caught."""
    by = Counter(row["by"] for row in rows)
    caught = [row for row in rows if row["caught"]]
    real = len(rows) - by["equivalent"]
    return {
        "planted": len(rows), **{check: by[check] for check in ("lint", "collectives", "ranks", "numerics", "running")},
        **{check: sum(check in row["told"] for row in rows) for check in ("effect", "memory")},
        "equivalent": by["equivalent"], "false_pass": by["false PASS"], "named": sum(row["named"] for row in caught),
        "located": sum(row["located"] and not row["named"] for row in caught),
        "rate": round(len(caught) / real, 4) if real else None}


def table_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What benchmarks/results keeps of a run's rows."""
    equal = [row for row in rows if row["by"] == "equivalent"]
    names = dict.fromkeys(row["operator"] for row in rows)
    return {
        "subjects": list(dict.fromkeys(row["subject"] for row in rows)),
        "whole": {"kind": "all", **figures(rows)},
        "operators": {name: {"about": OPERATORS[name].about, "kind": OPERATORS[name].kind,
                             **figures([row for row in rows if row["operator"] == name])} for name in names},
        "alone": Counter(next(iter(row["caught"])) for row in rows if len(row["caught"]) == 1),
        "told": {check: {"rows": sum(check in row["told"] for row in rows),
                         "caught": sum(check in row["told"] and bool(row["caught"]) for row in rows),
                         "equivalent": sum(check in row["told"] for row in equal)} for check in ("effect", "memory")},
        "equivalent": Counter(map(reason, equal)),
        "listed": [row["key"] for row in equal if reason(row) == DEFAULT],
        "survivors": [{"key": row["key"], "nodes": row["nodes"], "why": why_survived(row)}
                      for row in rows if row["by"] == "false PASS"]}


def unmet(table: dict[str, Any], planted: int = 0, operators: int = 0) -> list[str]:
    """One sentence for each bound that a table of results misses."""
    found = [f"{name}: {row['rate']:.1%} are caught" for name, row in table["operators"].items()
             if row["rate"] is not None and row["rate"] < LEAST_EACH]
    if table["whole"]["rate"] < LEAST:
        found.append(f"{table['whole']['rate']:.1%} of all are caught")
    if table["whole"]["planted"] < planted or len(table["operators"]) < operators:
        found.append(f"{table['whole']['planted']} mutants of {len(table['operators'])} operators")
    found += [f"{key} gives the same bits, and no reason is known" for key in table["listed"]]
    return found + [f"{each['key']} is not caught, and no reason is known" for each in table["survivors"]
                    if each["why"] == DEFAULT]


def write_table(rows: Sequence[dict[str, Any]]) -> None:
    """Draw a run's rows together, as benchmarks/results keeps them, and put the rows beside that, as CSV."""
    head = {"torch": torch.__version__, "seed": SEED, "ranks": 2, "command": "python tests/mutants/judge.py"}
    RESULTS.with_suffix(".json").write_text(json.dumps(head | table_of(rows), indent=1) + "\n", encoding="utf-8")
    with RESULTS.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            named_by = "sentence" if row["named"] else "bisect" if row["located"] else ""
            writer.writerow([row["key"], " ".join(row["nodes"]), row["by"], " ".join(row["caught"]),
                             " ".join(row["told"]), named_by])


def main() -> None:
    path = ROOT / "out" / "mutants.jsonl"
    with ranks(2, "gloo", timeout=START, echo="none") as pool:
        for row in go_on(path, MUTANTS, pool):
            print(f"\r{row['key']:<80} {row['by']:<12}", end="", file=sys.stderr)
    write_table(read(path))


if __name__ == "__main__":
    main()
