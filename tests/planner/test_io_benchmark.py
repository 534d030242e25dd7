"""What benchmarks/io.py makes of a GPU's counters, without a GPU."""

import importlib.util
import runpy
import sys

import pytest

from tests.house.tree import ROOT

PRINTED = """==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","byte","byte"
"0","7","spin_kernel(long)","32","0"
"1","7","full_forward_scores","1,000","2,000"
"2","7","full_forward_weights","3,000","500"
"3","7","full_forward_output","700","100"
"4","7","spin_kernel(long)","32","0"
"5","7","void at::native::fill","10","0"
"6","7","full_backward_delta","20","1"
==PROF== Disconnected
"""


@pytest.fixture(scope="module")
def counters():
    spec = importlib.util.spec_from_file_location("benchmarks_io", ROOT / "benchmarks" / "io.py")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    made = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks_io"] = made  # a dataclass looks its module up
    spec.loader.exec_module(made)
    sys.path.remove(str(ROOT / "benchmarks"))
    yield made
    del sys.modules["benchmarks_io"]


def test_counters_are_read_case_by_case(counters):
    found = counters.counters.read_counters(PRINTED, [4, 9])
    assert [k["kernel"] for k in found[4]] == [f"full_forward_{n}" for n in ("scores", "weights", "output")]
    assert [(k["read"], k["written"]) for k in found[4]] == [(1000, 2000), (3000, 500), (700, 100)]
    assert [k["read"] for k in found[9]] == [10, 20]


def test_every_case_has_a_plan_and_a_prediction(counters):
    cases = counters.cases()
    assert len({case.name for case in cases}) == len(cases) and len({case.kind for case in cases}) < len(cases)
    for case in {case.kind: case for case in cases}.values():
        model = counters.predicted(case)
        wanted = {"standard": {"scores", "weights", "output"}}.get(case.algorithm, {"forward"})
        assert set(model["kernels"]) == wanted if case.direction == "forward" else "delta" in model["kernels"]
        assert sum(model["kernels"].values()) == pytest.approx(model["hbm_bytes"], abs=8) and model["ms"] > 0


def test_counted_and_predicted_kernels_are_joined(counters, tmp_path):
    case = counters.Case("standard", "forward", 4, 1024)
    row = {"case": vars(case), "row": case.name, "model": counters.predicted(case), "ms": 1.0, "beyond_bytes": 5}
    row |= counters.joined(case, row["model"], counters.counters.read_counters(PRINTED, [0, 1])[0])
    assert row["measured_bytes"] == 7300
    assert row["ratio"] == pytest.approx(row["model"]["hbm_bytes"] / 7300, abs=1e-3)
    assert [k["predicted"] for k in row["kernels"]] == list(row["model"]["kernels"].values())
    assert case.name in counters.told(row)
    record = {"rows": [row], "device": "a GPU"}
    counters.plot(record, tmp_path / "io.png")
    assert (tmp_path / "io.png").read_bytes().startswith(b"\x89PNG")
    times, traffic, memory, rest = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))["ladder"](record)
    assert times[2] == "| 1K | 1 |" and memory[2] == "| 1K | 5 B |" and traffic[2].startswith("| 1K | 7.3 kB (")
    assert len(rest) == 2
