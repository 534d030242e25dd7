"""`attncc show`: every cell of a picture against the mask itself."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from attncc.commands import picture


def band(rows, keys):
    distance = rows[:, None] - keys[None, :]
    return (distance >= 0) & (distance < 50) | (keys[None, :] < 3)


@pytest.mark.parametrize("room", [(8, 20), (20, 60), (40, 500)])
@pytest.mark.parametrize("tile", [(16, 16), (64, 32), (8, 128), (1, 1)])
@pytest.mark.parametrize("ranges", [((0, 150), (0, 131)), ((13, 99), (40, 131)), ((149, 150), (0, 1))])
def test_cells_count_the_mask(room, tile, ranges):
    lengths = 150, 131
    rows, keys = picture.windows(*ranges, lengths, tile, room)
    found = picture.survey(band, rows, keys)
    dense = band(np.arange(150), np.arange(131))
    skipped = partial = full = 0
    (low, high), (first, last) = rows.whole, keys.whole
    for i in range(low, high, tile[0]):
        for j in range(first, last, tile[1]):
            share = dense[i : i + tile[0], j : j + tile[1]]
            skipped, full = skipped + (not share.any()), full + share.all()
            partial += share.any() and not share.all()
    assert found.tiles == (skipped, partial, full)
    for i, top in enumerate(rows.starts(rows.cell)):
        for j, left in enumerate(keys.starts(keys.cell)):
            share = dense[top : top + rows.cell, left : left + keys.cell]
            assert (found.kept[i, j], found.pairs[i, j]) == (share.sum(), share.size)
    lines = picture.draw(found, picture.ASCII_LOOKS)
    assert len(lines) - 1 <= max(room[0], 4)


def test_blocks_do_not_change_a_count(monkeypatch):
    rows, keys = picture.windows((0, 150), (0, 131), (150, 131), (16, 16), (20, 60))
    whole = picture.survey(band, rows, keys)
    monkeypatch.setattr(picture, "BLOCK", 1000)
    assert (picture.survey(band, rows, keys).kept == whole.kept).all()


def test_the_picture_of_causal(program):
    found = program(
        "show", "causal.attn", "--shape", "heads=1,q_len=4,k_len=8", "--tile", "2,4", "--ascii", "--target", "cpu"
    )
    assert found.status == 0
    assert found.out.splitlines() == [
        "causal: 4 rows down, 8 keys across, tiles of 2 x 4",
        "  0    4",
        "0 ####|o...",
        "  ####|oo..",
        "2 ####|ooo.",
        "  ####|oooo",
        "a character is 1 x 1: # full tile, o kept, + partly, . masked, blank skipped",
        "tiles here: 0 skipped, 2 partial, 2 full of 4",
    ]


def test_zoom_batch_and_head(program):
    Path("p.attn").write_text(
        "attention p(length: i32[b], group: i32[h], gap: int = 0) { mask k + gap < length[b] and k != group[h] }"
    )
    args = [
        "show",
        "p.attn",
        "--shape",
        "batch=2,heads=3,q_len=2,k_len=6",
        "--tile",
        "1,8",
        "--ascii",
        "--target",
        "cpu",
    ]
    args += ["--set", "length=3,5", "--set", "group=[9,1,9]"]
    assert "0 oo...." not in program(*args).out and "0 ooo..." in program(*args).out
    assert "0 o.ooo." in program(*args, "--batch", "1", "--head", "1").out
    assert "0 oooo.." in program(*args, "--batch", "1", "--set", "gap=1").out
    zoomed = program(*args, "--rows", "-1:", "--keys", "2:4").out.splitlines()
    assert zoomed[1:3] == ["  2", "1 o."]


def test_contents_from_a_file_and_packed_bits(program):
    Path("t.attn").write_text("attention t(seen: bit[row, k], ok: bool[n]) { mask seen[row, k] and ok[k] and k < n }")
    seen = np.zeros((2, 40), bool)
    seen[0, 33], seen[1, 1] = True, True
    words = np.packbits(seen, axis=1, bitorder="little")
    packed = np.zeros((2, 8), np.uint8)
    packed[:, :5] = words
    args = ["show", "t.attn", "--shape", "heads=1,q_len=2,k_len=40", "--tile", "1,64", "--ascii", "--target", "cpu"]
    pictures = []
    for name, array in (("bits.npy", seen), ("words.npy", packed.view(np.int32))):
        np.save(name, array)
        found = program(*args, "--set", f"seen=@{name}", "--set", "ok=" + ",".join(["1"] * 40))
        assert found.status == 0, found.err
        pictures.append(found.out)
    assert pictures[0] == pictures[1]
    assert [line.count("o") for line in pictures[0].splitlines()[2:4]] == [1, 1]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ([], 2, "the mask reads length: give it with --set length=@FILE.npy"),
        (["length=1,2,3"], 2, "axis b is 2 long in this call, and 3 came"),
        (["length=[[1],[2]]"], 2, "2 dimensions were given"),
        (["length=1.5,2"], 2, "length is i32, and float64 was given"),
        (["length=[[1],[2,3]]"], 2, "lists are of different lengths"),
        (["length=3"], 2, "length is a tensor"),
        (["length=@nix.npy"], 5, "nix.npy cannot be read"),
        (["length=@causal.attn"], 2, "causal.attn is no .npy file"),
        (["foo=1,2"], 2, "no tensor parameter 'foo'"),
    ],
)
def test_contents_that_do_not_fit(program, given, status, said):
    Path("p.attn").write_text("attention p(length: i32[b]) { mask k < length[b] }")
    found = program(
        "show", "p.attn", "--shape", "batch=2", "--target", "cpu", *(a for g in given for a in ("--set", g))
    )
    assert found.status == status and said in found.err, found.err


def test_an_example_is_drawn_the_same_twice(program):
    Path("d.attn").write_text(
        "attention d(doc: i32[b, k], keep: bit[h, k], gap: int, ends: f32[n]) {"
        " mask doc[b, q] == doc[b, k] and keep[h, k] and q - k >= -gap and k < n * 8 and ends[0] < 2.0 }"
    )
    args = ["show", "d.attn", "--shape", "q_len=64,k_len=64", "--tile", "16,16", "--target", "cpu", "--example"]
    first, again, another = (program(*args, seed) for seed in (1, 1, 3))
    assert first.status == 0 and first.out == again.out != another.out
    assert program(*args, 1, "--set", "gap=0").out != first.out
    refused = program(*args, 1, "--set", "n=3")
    assert refused.status == 2 and "free axis n" in refused.err


def test_too_much_is_refused_and_zoom_helps(program):
    args = ["show", "causal.attn", "--shape", "q_len=1000000,k_len=1000000", "--target", "cpu"]
    found = program(*args)
    assert found.status == 2 and "zoom in" in found.err
    assert program(*args, "--rows", "500000:500100", "--keys", "499900:500200").status == 0


def test_png(program):
    found = program("show", "causal.attn", "--png", "m.png", "--target", "cpu")
    assert found.status == 0 and found.out == "wrote m.png\n"
    assert Path("m.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert program("show", "causal.attn", "--png", "no/m.png", "--target", "cpu").status == 5


def test_png_without_matplotlib(program, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = program("show", "causal.attn", "--png", "m.png", "--target", "cpu")
    assert found.status == 5 and "attncc[plot]" in found.err and not Path("m.png").exists()
