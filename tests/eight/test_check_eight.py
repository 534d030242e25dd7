"""What `attncc check` says of 8-bit inputs, and that its bound holds and can fail."""

from __future__ import annotations

import json

import pytest

from attncc import cli, frontend
from attncc.ir import Shape
from attncc.runtime import check_eight, eight
from attncc.runtime.check_eight import KINDS, check

SHAPE = (Shape(1, 4, 2, 130, 260, 64, 64),)
SPECS = {
    "default": "attention x { mask k <= q } precision { inputs f8e4m3 }",
    "plain": "attention x { mask k <= q } precision { inputs f8e4m3 scales per_tensor rotate none }",
    "cap": "attention x { score 20 * tanh(s / 20)  softmax off_by_one } precision { inputs f8e5m2 }",
}


@pytest.fixture(scope="module")
def reports():
    return {name: check(frontend.parse(text).spec, shapes=SHAPE) for name, text in SPECS.items()}


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_keeps_its_bound(reports, name):
    report = reports[name]
    assert report.passed and [r.inputs for r in report.rows] == list(KINDS)
    assert all(r.rmse_dequantised < 0.3 * r.rmse or r.inputs == "flat" for r in report.rows)
    assert all(r.lse < 3e-3 for r in report.rows)


def test_rotation_and_blocks_help_with_outliers():
    """The default beside one scale for all and no rotation, over draws that differ by a factor of 2."""
    found = []
    for name in ("default", "plain"):
        rows = check(frontend.parse(SPECS[name]).spec, shapes=SHAPE, seeds=range(8)).rows
        found.append({kind: sum(r.rmse**2 for r in rows if r.inputs == kind) ** 0.5 for kind in KINDS})
    ours, plain = found
    assert ours["outliers"] < 0.8 * plain["outliers"] and ours["channels"] < 0.9 * plain["channels"]
    assert all(ours[kind] < {"entries": 1.2}.get(kind, 1.05) * plain[kind] for kind in KINDS)


def test_the_bound_can_fail(monkeypatch):
    usual = eight.EightBit.of
    monkeypatch.setattr(eight.EightBit, "of", lambda self, x, given: tuple(y * 1.01 for y in usual(self, x, given)))
    report = check(frontend.parse(SPECS["default"]).spec, shapes=SHAPE)
    assert not any(r.passed for r in report.rows)


def test_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(check_eight.SHAPES, "cpu", SHAPE)
    path = tmp_path / "e.attn"
    path.write_text(SPECS["default"])
    assert cli.run(["check", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] and {r["inputs"] for r in said["rows"]} == set(KINDS)
    assert cli.run(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "bf16's RMSE" in shown and "sink" in shown
    assert cli.run(["check", str(path), "--device", "interpreter"]) == 2
