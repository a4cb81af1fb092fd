"""docs/scaling.md: what it predicts is what the model makes of the costs that it says."""

import re
import statistics

import pytest

from benchmarks import prove_scaling
from benchmarks.capacity import ROLES, US, Limits, Memory, most_hosts, needs
from benchmarks.capacity_networks import MIB
from tests.wheel import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text()
GIB = 2**30


def rows(text):
    """Returns the cells of each row of the tables in a text, but for their heads."""
    found = re.findall(r"^\| ?(.*?) ?\|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in found]
    heads = {index - 1 for index, line in enumerate(cells) if set("".join(line)) == {"-"}}
    return [
        line
        for index, line in enumerate(cells)
        if index not in heads and set("".join(line)) != {"-"}
    ]


def number(cell):
    return float(re.sub(r"[, %]|[A-Za-z]+$", "", cell))


def section(title):
    """Returns what is below a heading until the next one of any size."""
    return re.search(rf"^#+ {re.escape(title)}$\n(.*?)(?=^#+ |\Z)", PAGE, re.DOTALL | re.MULTILINE)[
        1
    ]


MODEL = rows(section("The model"))
KINDS = ("steps", "rows", "bytes", "threaded", "batches", "batch_rows", "batch_bytes")
COSTS = {
    role: {
        kind: number(cell) * US / (1024 if kind.endswith("bytes") else 1)
        for kind, cell in zip(KINDS, cells, strict=True)
        if cell
    }
    for role, *cells in MODEL
    if role in ROLES
}


def memory_of(role):
    at = next(i for i, (name, *_) in enumerate(MODEL) if name.startswith(f"{role} server, resid"))
    (_, base), (_, group) = MODEL[at : at + 2]
    return Memory(number(base) * MIB, number(group) * MIB)


MEMORY = {role: memory_of(role) for role in ("policy", "buffer")}


def test_it_has_a_cost_for_whatever_a_service_s_time_goes_by():
    assert {role: tuple(costs) for role, costs in COSTS.items()} == ROLES


@pytest.mark.parametrize("host", prove_scaling.HOSTS, ids=lambda host: host.name)
def test_predictions_are_those_of_the_model(host):
    text = section(f"Predicted: each host has {host.name}")
    for role in ("policy", "buffer", "learner"):
        told = number(re.search(rf"\b{role} ([\d,]+)", text)[1])
        assert told == pytest.approx(
            most_hosts(host, role, COSTS, Limits(), MEMORY), abs=0.6, rel=0.02
        )
    table, hosts = rows(text), 0
    assert len(table) == 3 * 3
    for first in range(0, len(table), 3):
        hosts = int(number(table[first][0]))
        work = host.work(hosts)
        assert [number(cell) for cell in table[first][1:3]] == pytest.approx(
            [work.rows, work.bytes / 1e6], abs=0.05
        )
        expected = needs(host, hosts, COSTS, Limits(), MEMORY)
        for need, (*_, role, cores, gib, processes, because) in zip(
            expected, table[first : first + 3], strict=True
        ):
            assert (role, because) == (need.role, need.because)
            # Of costs that were rounded to three digits.
            assert number(cores) == pytest.approx(need.cores, rel=0.01, abs=0.006)
            assert int(processes) == pytest.approx(need.processes, rel=0.02, abs=0)
            if role in MEMORY:
                assert number(gib) == pytest.approx(need.memory / GIB, rel=0.02, abs=0.06)
    assert hosts == 1000


def test_a_learner_s_memory_is_that_of_the_sizes_it_says():
    table = rows(section("A learner's memory"))
    (_, base), *each = (line for line in table if len(line) == 2)
    costs = [number(cell) for _, cell in each]
    runs = [line for line in table if len(line) == 5 and line[3] != "fitted"]
    assert len(runs) == 2
    for *sizes, said, measured in runs:
        told, error = re.fullmatch(r"(\d+) \(([+-]\d+) %\)", said).groups()
        found = number(base) + sum(
            cost * float(size) for cost, size in zip(costs, sizes, strict=True)
        )
        assert float(told) == pytest.approx(found, rel=0.01)
        assert float(error) == pytest.approx(100 * (float(told) / float(measured) - 1), abs=0.6)


def test_the_errors_that_it_sums_up_are_those_of_its_table():
    text = section("Against what was run")
    for column, role in enumerate(ROLES, 3):
        cells = [line[column] for line in rows(text)]
        pairs = [
            re.fullmatch(r"([\d.]+) / ([\d.]+) \(([+-]\d+) %\)", cell).groups() for cell in cells
        ]
        for predicted, measured, error in pairs:
            assert float(error) == pytest.approx(
                100 * (float(predicted) / float(measured) - 1), abs=2.0
            )
        sizes = [abs(int(error)) for *_, error in pairs]
        median, largest = re.search(rf"\b{role} (\d+) and (\d+) %", text).groups()
        assert int(median) == pytest.approx(statistics.median(sizes), abs=0.5)
        assert int(largest) == max(sizes)


def test_parts_of_a_gpu_are_those_that_are_computed(capsys):
    prove_scaling._print_gpu()
    computed = rows(capsys.readouterr().out)
    told = [
        [cell.replace(" %", "%") for cell in line]
        for line in rows(section("On a GPU: computed, not measured"))
    ]
    assert told == computed
