"""`attncc explain`: its facts as JSON against numbers worked out here, and its text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

SPECS = Path(__file__).resolve().parents[2] / "specs"
MASK = {"pairs", "total", "empty_rows", "tiles"}
PLAN = {"algorithm", "loop", "tile_q", "tile_k", "stages", "warps", "shared_bytes"}
IO = {"hbm_bytes", "standard_hbm_bytes", "flops", "bound", "predicted_ms"}


def facts(program, *args):
    found = program("explain", *args, "--json")
    assert found.status == 0, found.err
    return json.loads(found.out)


@pytest.mark.parametrize("spec", sorted(SPECS.glob("*.attn")), ids=lambda p: p.stem)
def test_fields_of_every_spec(program, spec):
    found = facts(program, spec, "--target", "sm_90")
    assert found["name"] == spec.stem and found["align"] in ("end", "start")
    assert found["mask"].keys() >= MASK and found["mask"]["tiles"].keys() == {"skipped", "partial", "full"}
    assert found["plan"].keys() >= PLAN and found["io"].keys() >= IO
    assert found["rejected"] and all(r["reason"] and r["plan"].keys() >= PLAN for r in found["rejected"])
    assert found["mask"]["total"] == 16 * 4096 * 4096 and found["io"]["predicted_ms"] > 0
    text = program("explain", spec, "--target", "sm_90").out
    assert all(f"\n{head}" in "\n" + text for head in ("meaning", "mask for", "plan for sm_90", "one call"))


def test_numbers_of_causal(program):
    sizes = "batch=2,heads=6,kv_heads=3,q_len=100,k_len=130,head_dim=64"
    found = facts(program, "causal.attn", "--target", "sm_90", "--shape", sizes)
    tile_q, tile_k = found["plan"]["tile_q"], found["plan"]["tile_k"]
    kept = np.arange(130)[None, :] <= np.arange(100)[:, None] + 30
    partial = full = total = 0
    for i in range(0, 100, tile_q):
        for j in range(0, 130, tile_k):
            tile, total = kept[i : i + tile_q, j : j + tile_k], total + 1
            whole = tile.all() and tile.shape[1] == tile_k
            full, partial = full + whole, partial + (tile.any() and not whole)
    assert found["mask"]["pairs"] == 12 * kept.sum() and found["mask"]["total"] == 12 * 13_000
    assert found["mask"]["empty_rows"] == 0 and found["mask"]["causal"] == "k <= q"
    assert found["mask"]["tiles"] == {
        "skipped": 12 * (total - partial - full),
        "partial": 12 * partial,
        "full": 12 * full,
    }
    assert found["shape"] | {"heads": 6, "head_dim_v": 64, "dtype": "bf16"} == found["shape"]
    assert found["io"]["hbm_bytes"] == 12 * 100 * (128 * 2 + 4) + 6 * 130 * 128 * 2


def test_the_time_names_what_binds_it_and_what_takes_the_rest(program):
    args = (SPECS / "causal.attn", "--shape", "heads=2,q_len=64,k_len=64", "--target")
    text = " ".join(program("explain", *args, "sm_90").out.split())
    assert "bound by memory transfers, 0.0303 us at their full rate; launching, starting programs," in text
    assert "take the rest backward" in text and text.count("at their full rate") == 2
    text = " ".join(program("explain", *args, "cpu").out.split())
    assert "us predicted; bound by the products" in text and "full rate" not in text


def test_a_cpu_has_memory_and_a_cache(program):
    shape = ("--shape", "q_len=16384,k_len=16384")
    text = " ".join(program("explain", SPECS / "full.attn", "--target", "cpu", *shape).out.split())
    assert "of main memory, what the cache does not hold from use to use read again" in text
    assert "HBM" not in text and "L2" not in text


def test_empty_rows_are_counted_and_explained(program):
    found = facts(program, "causal.attn", "--target", "cpu", "--shape", "heads=2,q_len=10,k_len=4")
    assert found["mask"]["empty_rows"] == 2 * 6 and found["mask"]["no_empty_row"] == "q_len <= k_len"
    text = program("explain", "causal.attn", "--target", "cpu", "--shape", "heads=2,q_len=10,k_len=4").out
    assert "12 here; none exactly where q_len <= k_len" in text


def test_what_needs_contents_is_null_until_they_are_given(program):
    spec = SPECS / "padding.attn"
    args = (spec, "--target", "sm_90", "--shape", "batch=2,heads=4,q_len=8,k_len=300")
    found = facts(program, *args)
    assert found["mask"]["pairs"] is None and found["mask"]["empty_rows"] is None
    assert set(found["mask"]["tiles"].values()) == {None} and found["io"]["visited_tiles"] is None
    assert "--set gives them" in program("explain", *args).out
    found = facts(program, *args, "--set", "length=0,300")
    assert found["mask"]["pairs"] == 4 * 8 * 300 and found["mask"]["empty_rows"] == 4 * 8


def test_a_parameter_without_a_value_is_null_until_it_is_given(program):
    args = (SPECS / "neighborhood_2d.attn", "--target", "sm_90", "--shape", "heads=1,q_len=64,k_len=64")
    assert facts(program, *args)["mask"]["pairs"] is None
    given = ("--set", "height=8", "--set", "width=8", "--set", "radius=1")
    found = facts(program, *args, *given)
    assert found["mask"]["pairs"] == 64 * 9
    assert [p["value"] for p in found["params"]] == [8, 8, 1]


def test_an_array_file_gives_contents(program):
    ids = np.repeat(np.arange(4), 16)[None].astype(np.int32)
    np.save("doc.npy", ids)
    args = (SPECS / "document.attn", "--target", "cpu", "--shape", "heads=1,q_len=64,k_len=64", "--set", "doc=@doc.npy")
    assert facts(program, *args)["mask"]["pairs"] == 4 * 16 * 17 // 2
    found = facts(program, SPECS / "document.attn", "--target", "sm_90", "--shape", "batch=3,q_len=1000,k_len=1000")
    assert found["mask"]["tables"] and found["mask"]["pairs"] is None
    for table in found["mask"]["tables"]:
        tile = found["plan"]["tile_q" if table["axis"] == "q" else "tile_k"]
        element = 2 if table["reduce"] in ("first", "stop", "run") else 4  # numbers of tiles are short
        assert table["bytes"] == element * 3 * -(-1000 // tile) and table["over"] == ["b"]


def test_tables_of_documents_at_a_million_positions_fit_a_quarter_megabyte(program):
    found = facts(program, SPECS / "document.attn", "--target", "sm_90", "--shape", f"q_len={2**20},k_len={2**20}")
    assert sum(table["bytes"] for table in found["mask"]["tables"]) <= 256 * 1024
    assert not found["mask"]["listed"]


def test_a_table_of_blocks_says_what_its_list_takes(program):
    found = facts(program, SPECS / "block_sparse.attn", "--target", "sm_90", "--shape", "heads=4,q_len=1000,k_len=2000")
    tiles_q, tiles_k = -(-1000 // found["plan"]["tile_q"]), -(-2000 // found["plan"]["tile_k"])
    assert found["mask"]["listed"]
    assert [t["bytes"] for t in found["mask"]["tables"]] == [4 * 4 * tiles_q * (tiles_k + 2)]


def test_a_table_read_pair_by_pair_is_said_to_leave_no_tile_out(program):
    Path("graph.attn").write_text("attention graph(seen: bool[row, k]) { mask seen[row, k] }")
    (why,) = facts(program, "graph.attn", "--target", "sm_90")["mask"]["opaque"]
    assert "pair by pair" in why


def test_warnings_in_plain_words(program):
    Path("n.attn").write_text("attention causal(unused: int) { mask k < q and k > q }")
    found = program("explain", "n.attn", "--target", "cpu")
    assert found.status == 0 and "warning W201" in found.err and "n.attn:1:18: warning W101" in found.err
    codes = [w["code"] for w in facts(program, "n.attn", "--target", "cpu")["warnings"]]
    assert codes == ["W101", "W201"]


def test_a_layout_that_is_asked_for(program):
    dense, packed = (facts(program, "causal.attn", "--target", "sm_90", "--layout", n) for n in ("dense", "ragged"))
    assert dense["mask"]["pairs"] == packed["mask"]["pairs"]
    assert (dense["plan"]["algorithm"], packed["plan"]["algorithm"]) == ("fa3", "fa2")
    picture = ("show", "causal.attn", "--target", "sm_90", "--shape", "q_len=2048,k_len=2048,head_dim=64", "--layout")
    of_tiles = [
        program(*picture, layout).out.splitlines()[0].rpartition("tiles of")[2] for layout in ("dense", "ragged")
    ]
    assert of_tiles[0] != of_tiles[1]


def test_rejected_plans(program):
    short = program("explain", "causal.attn", "--target", "sm_90").out
    long = program("explain", "causal.attn", "--target", "sm_90", "--rejected").out
    assert "shown by --rejected" in short and "shown by --rejected" not in long
    assert len(long.splitlines()) > len(short.splitlines())


def test_the_backward_pass_has_a_plan_of_its_own(program, tmp_path):
    plain = facts(program, "causal.attn", "--target", "sm_90")["backward"]
    assert (plain["algorithm"], plain["kernels"].keys()) == ("fa3", {"dQ, dK and dV"})
    wide = facts(program, "causal.attn", "--target", "sm_90", "--shape", "head_dim=256")
    assert wide["backward"]["kernels"].keys() == {"dQ", "dK and dV"} and wide["pinned"] == []
    pinned = tmp_path / "causal.attn"
    pinned.write_text("attention causal { mask k <= q } schedule { algorithm fa2 }")
    wide = facts(program, pinned, "--target", "sm_90", "--shape", "head_dim=256")
    assert wide["backward"]["kernels"].keys() == {"dQ", "dK", "dV"}
    pinned.write_text("attention causal { mask k <= q } schedule { tile q = 64 stages 2 }")
    found = facts(program, pinned, "--target", "sm_90")
    assert found["plan"]["tile_q"] == 64 and found["pinned"] == ["tile_q", "stages"]
    assert found["backward"] == plain
    text = program("explain", pinned, "--target", "sm_90").out
    assert "dK and dV in tiles of 64 x 128" in text and "tile_q, stages: of the forward pass" in text
    assert facts(program, pinned, "--target", "cpu")["backward"] is None


@pytest.mark.parametrize("command", ["explain", "show"])
@pytest.mark.parametrize("width", [0, -3])
def test_a_divisor_is_refused_as_a_call_refuses_it(program, command, width):
    given = ("--set", f"width={width}", "--set", "height=4", "--set", "radius=1", "--shape", "q_len=64,k_len=64")
    found = program(command, SPECS / "neighborhood_2d.attn", "--target", "sm_90", *given)
    assert found.status == 2 and f"width divides, so that it must be at least 1, and is {width}" in found.err
    assert not found.out


def test_a_computed_divisor_is_refused_as_a_call_refuses_it(program, tmp_path):
    path = tmp_path / "computed.attn"
    path.write_text("attention computed(w: int, c: const int = 3) { mask q // (w - c) == k // (w - c) }")
    found = program("explain", path, "--target", "sm_90", "--set", "w=3")
    said = "w - 3 divides, so that it must be at least 1, and is 0 with w = 3"
    assert found.status == 2 and said in found.err and not found.out
    assert program("explain", path, "--target", "sm_90", "--set", "w=4").status == 0
    assert program("check", path, "--device", "cpu").status == 0  # what it draws is never refused


@pytest.mark.parametrize("divisor", ["c", "c * c", "c - 1 + c"])
def test_a_constant_divisor_is_refused_in_the_spec(program, tmp_path, divisor):
    path = tmp_path / "constant.attn"
    path.write_text(f"attention constant(c: const int = 3) {{ mask q // ({divisor}) == k // ({divisor}) }}")
    found = program("explain", path, "--target", "sm_90", "--set", "c=0")
    assert found.status == 1 and "constant.attn:1:20: error E407: c = 0 makes a divisor of '//'" in found.err
    assert not found.out and program("explain", path, "--target", "sm_90").status == 0


def test_an_int_beyond_64_bits_is_refused_as_a_call_refuses_it(program, tmp_path):
    path = tmp_path / "wide.attn"
    path.write_text("attention wide(w: int) { mask k <= q + w * k_len }")
    sizes = ("--target", "sm_90", "--shape", "k_len=1024")
    found = program("explain", path, *sizes, "--set", f"w={2**53}")
    said = "w * k_len is 9223372036854775808 with k_len = 1024, w = 9007199254740992, which does not fit 64 bits"
    assert found.status == 2 and said in found.err and not found.out
    assert program("explain", path, *sizes, "--set", f"w={2**52}").status == 0


def test_no_plan_and_no_target(program):
    assert program("explain", "causal.attn", "--target", "sm_90", "--shape", "head_dim=513").status == 3
    assert program("explain", "causal.attn", "--target", "sm_1").status == 2


def test_lines_fit_the_terminal(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = program("explain", SPECS / "neighborhood_2d.attn", "--target", "sm_90").out.splitlines()
    theirs = (SPECS / "neighborhood_2d.attn").read_text()  # the spec's own lines are not broken
    assert all(len(line) <= 80 or line.removeprefix("  spec").strip() in theirs for line in lines)


def test_an_algorithm_that_is_asked_for(program):
    size = {"standard": 16 * 4096 * 4096 * 6, "fa1": 16 * 4096 * (128 + 2) * 4, "fa2": 0}
    for algorithm, scratch in size.items():
        found = facts(program, "causal.attn", "--target", "sm_90", "--algorithm", algorithm)
        assert found["plan"]["algorithm"] == algorithm and found["scratch_bytes"] == scratch
    text = program("explain", "causal.attn", "--target", "sm_90", "--algorithm", "standard").out
    assert "scores and weights, 1.61 GB beside the output" in text and "  backward      fa2, " in text
    assert "its own plan, from the lse" in " ".join(text.split()) and "busy" not in text
    Path("outer.attn").write_text("attention a { mask k <= q } schedule { loop kv_outer }")
    text = program("explain", "outer.attn", "--target", "sm_90").out
    assert "pass has its own plan, from the lse" in " ".join(text.split()) and "  backward      fa3, " in text
    few = program("explain", "causal.attn", "--target", "sm_90", "--algorithm", "fa1").out
    assert "16 of 132 multiprocessors busy" in " ".join(few.split())
    text = program("explain", "causal.attn", "--target", "cpu", "--algorithm", "fa1").out
    assert "the CPU's program, which is one for all algorithms" in text


def test_all_constants_without_a_value_are_named_at_once(program):
    Path("x.attn").write_text("attention x(m: const int, n: const int) { mask q // m == k // n }")
    found = program("explain", "x.attn", "--target", "cpu")
    assert found.status == 2 and "x needs a value for its constants m, n: --set m=... --set n=..." in found.err
