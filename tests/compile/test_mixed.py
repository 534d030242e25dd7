"""8-bit k and v beside a q of floats, compiled: what multiplies, and the shared memory that is predicted."""

from __future__ import annotations

import pytest

from attncc import pipeline

TILES = "tile q = 64, k = 64  stages 3  warps 4"


@pytest.mark.parametrize(
    ("target", "precision", "unit"),
    [("sm_80", "bf16, f8e5m2", "mma"), ("sm_89", "f16, f8e4m3 scales per_head", "mma"),
     ("sm_90", "bf16, f8e4m3", "wgmma"), ("sm_90", "bf16, f8e4m3 scales per_block(128)", "wgmma"),
     ("sm_100", "bf16, f8e4m3", "tcgen05"), ("gfx942", "bf16, f8e4m3", "mfma")],
)  # fmt: skip
def test_predicted_shared_memory(tmp_path, target, precision, unit):
    """At least what is taken, and no more than a tenth above."""
    text = f"attention x {{ mask k <= q }} precision {{ inputs {precision} }} schedule {{ {TILES} }}"
    planned = pipeline.plan(pipeline.Request(text=text, target=target, sizes=(("head_dim", 64), ("head_dim_v", 64))))
    for plan in pipeline.every_kernel(planned):
        source = tmp_path / "x.py"
        source.write_text(pipeline.render(plan), encoding="utf-8")
        found = pipeline.compiled(plan, source)
        assert found.instructions.get(unit)
        assert found.shared_bytes <= found.predicted_shared_bytes <= 1.1 * found.shared_bytes
