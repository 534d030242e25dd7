"""What a spec's text becomes, where its parts stand, and how faults are told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attncc.errors import SpecError
from attncc.frontend import Parsed, bind, built, parse, refuse_unbuilt
from attncc.frontend.consts import MAX_FAULTS, POLICY_ARGUMENTS, TARGETS
from attncc.ir import POLICIES, AttentionSpec, Const, Layout, Op, Param, Precision, Read, Schedule, Softmax, Var, walk


def codes(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return [d.code for d in caught.value.diagnostics]


def spelt(parsed: Parsed, key: str) -> str:
    span = parsed.spans[key]
    return parsed.text[span.start : span.end]


def test_design_example() -> None:
    text = """attention window_alibi(window: int = 1024, slopes: f32[h], sinks: f32[h] grad) {
    let distance = q - k
    mask    0 <= distance < window
    score   s - slopes[h] * distance
    softmax sink(sinks[h])
}
precision { inputs bf16  products ieee  accumulate f32 }
schedule { algorithm fa2  loop q_outer  tile q = 128, k = 64  stages 3  warps 8 }
schedule sm_90 { algorithm fa3 }
layout { kv paged(page = 16), int8(scales = token) }
"""
    q, k, h, s = Var("q", "int"), Var("k", "int"), Var("h", "int"), Var("s", "float")
    distance = Op("-", (q, k), "int")
    parsed = parse(text)
    assert parsed.spec == AttentionSpec(
        "window_alibi",
        (
            Param("window", "int", default=1024),
            Param("slopes", "float", "f32", ("h",)),
            Param("sinks", "float", "f32", ("h",), grad=True),
        ),
        (("distance", distance),),
        (
            Op(
                "and",
                (Op("<=", (Const(0), distance), "bool"), Op("<", (distance, Var("window", "int")), "bool")),
                "bool",
            ),
        ),
        (
            Op(
                "-",
                (s, Op("*", (Read("slopes", (h,), "float"), Op("float", (distance,), "float")), "float")),
                "float",
            ),
        ),
        softmax=Softmax("sink", (Read("sinks", (h,), "float"),)),
        precision=Precision("bf16"),
        schedules=(Schedule(None, "fa2", "q_outer", 128, 64, 3, 8), Schedule("sm_90", "fa3")),
        layout=Layout("dense", "paged(page = 16), int8(scales = token)"),
    )
    assert parsed.warnings == ()
    assert {key: spelt(parsed, key) for key in ("attention", "param:window", "let:distance", "mask:0", "softmax")} == {
        "attention": "window_alibi",
        "param:window": "window: int = 1024",
        "let:distance": "let distance = q - k",
        "mask:0": "mask    0 <= distance < window",
        "softmax": "softmax sink(sinks[h])",
    }
    assert spelt(parsed, "schedule.tile") == "tile q = 128, k = 64"
    assert spelt(parsed, "schedule.sm_90.algorithm") == "algorithm fa3"
    assert spelt(parsed, "layout.kv") == "kv paged(page = 16), int8(scales = token)"


def test_newlines_mean_nothing() -> None:
    lines = "attention x ( w : int ) { let d = q - k mask 0 <= d < w align start } precision { inputs f16 warps }"
    assert codes(lines) == ["E205"]
    lines = lines.replace(" warps", "")
    assert parse(lines).spec == parse(lines.replace(" ", "\n")).spec == parse(lines.replace(" ", " # c\n")).spec


def test_each_fault_is_told_once() -> None:
    """As many diagnostics as faults, though every second statement is wrong."""
    statements = [
        "mask k <=",
        "mask k <= q",
        "score s +* 2",
        "score s",
        "let a = (k",
        "let c = k",
        "weight )",
        "softmax sink(c",
    ]
    assert codes("attention x {\n" + "\n".join(statements) + "\n}") == ["E206", "E205", "E208", "E208", "E208"]


def test_uses_of_a_faulty_definition_are_no_faults() -> None:
    text = "attention x(a: intt, c: i32[b, q], lambda: int) { let d = a + * 2 mask d < a and c[b, k] > lambda }"
    assert codes(text) == ["E601", "E603", "E302", "E205"]


def test_faults_come_in_the_order_of_the_text() -> None:
    text = "attention x {\n mask zz\n let a = yy\n}\nschedule { warps 3 }\nprecision { inputs q8 }"
    with pytest.raises(SpecError) as caught:
        parse(text, "file.attn")
    spans = [d.span for d in caught.value.diagnostics if d.span]
    assert len(spans) == 4
    assert spans == sorted(spans)
    assert str(caught.value).count("file.attn:") == 4


def test_too_many_faults() -> None:
    found = codes("attention x {\n" + "\n".join(f"let a{i} = zz{i}" for i in range(120)) + "}")
    assert found[:3] == ["E301"] * 3 and len(found) == MAX_FAULTS + 1
    assert found[-1] == "E805"


def test_keywords_do_not_glue() -> None:
    assert codes("attention x { maskk <= q }") == ["E204"]
    assert codes("attention x { mask (k < q)orx }") == ["E205"]
    assert parse("attention x(masks: int, letter: int) { mask k < masks + letter }").spec.name == "x"


@pytest.mark.parametrize("name", ["window", "q_", "scores", "int8", "online", "fa2", "class_", "match", "T", "a" * 64])
def test_names_that_are_fine(name: str) -> None:
    assert parse(f"attention x({name}: int) {{ mask k < {name} }}").spec.params[0].name == name


REFUSED = """
q k v seed deterministic validate return_lse return_x b h h_kv row s b_len h_len q_len k_len abs where and or not true
let mask sorted grad attention class lambda None int float bool i32 bit _x __import__
"""


@pytest.mark.parametrize("name", [*REFUSED.split(), "a" * 65])
def test_names_that_are_refused(name: str) -> None:
    assert set(codes(f"attention x({name}: int) {{ }}")) <= {"E302", "E205", "E208"}
    assert codes(f"attention x {{ let {name} = 3 }}")[0] in ("E302", "E205", "E206")


def test_free_axes() -> None:
    spec = parse("attention x(t: i32[n, m], u: f32[m, h]) { score s + u[t[k % n, q % m], h] }").spec
    assert spec.free_axes == ("n", "m")
    assert Var("n", "int") in [e.args[1] for e in _ops(spec.scores[0], "%")]


def _ops(e: object, op: str) -> list[Op]:
    return [n for n in walk(e) if isinstance(n, Op) and n.op == op]  # type: ignore[arg-type]


def test_order_between_kinds_is_free() -> None:
    first = parse("attention x { mask d > 0 softmax off_by_one let d = q - k score s * d scale 0.5 }").spec
    second = parse("attention x { let d = q - k scale 0.5 score s * d mask d > 0 softmax off_by_one }").spec
    assert first == second


def test_warnings_do_not_stop() -> None:
    parsed = parse("attention x(w: int) { mask k <= q }", "w.attn")
    assert [w.code for w in parsed.warnings] == ["W101"]
    assert parsed.warnings[0].render(parsed.text, parsed.filename).startswith("w.attn:1:13: warning W101: ")


@pytest.mark.parametrize(
    ("mask", "warned"),
    [
        ("doc[b, q] == doc[b, k]", True),
        ("k <= q and doc[b, q] == doc[b, k]", False),
        ("q >= k and doc[b, q] == doc[b, k]", False),
        ("0 <= q - k < 64 and doc[b, q] == doc[b, k]", False),
        ("q >= 0 and doc[b, q] == doc[b, k]", False),
        ("(k <= q or k < 4) and doc[b, q] == doc[b, k]", True),
        ("doc[b, max(q, 0)] == doc[b, k]", False),
        ("doc[b, q // 2] == doc[b, k]", True),
        ("doc[b, row] == doc[b, k]", False),
        ("doc[b, q - k] == 0", False),
        ("doc[b, q] == doc[b, k] align start", False),
    ],
)
def test_negative_query_positions(mask: str, warned: bool) -> None:
    parsed = parse(f"attention x(doc: i32[b, n]) {{ mask {mask} }}")
    assert ("W103" in [w.code for w in parsed.warnings]) == warned


def test_not_yet_is_told_all_at_once() -> None:
    text = (
        "attention x { dropout 0.1 }\n"
        "precision { inputs f8e4m3 rotate hadamard scales per_block(64) }\n"
        "schedule { loop kv_outer }\nschedule gfx942 { algorithm split_kv }\nlayout { q ragged "
        "kv dense, int8(scales = token) }"
    )
    with pytest.raises(SpecError) as caught:
        refuse_unbuilt(parse(text, "n.attn"))
    found = [d.code for d in caught.value.diagnostics]
    assert found == ["N105", "N108", "E708", "N106", "E708", "N103", "N104"]
    every = [d for d in caught.value.diagnostics if d.code != "E708"]  # that of fa1 is for ever
    assert all(d.span is not None and d.message.startswith("not yet: ") for d in every)
    assert "n.attn:2:13: error N105: not yet: inputs f8e4m3 of packed sequences" in str(caught.value)


def test_passes() -> None:
    parsed = parse("attention x { mask k <= q }")
    refuse_unbuilt(parsed)
    refuse_unbuilt(parsed, ("forward", "backward"))
    unbuilt = {"forward", "backward", "jvp"} - built.PASSES
    for name in unbuilt:
        with pytest.raises(SpecError, match=f"N109: not yet: the {name} pass"):
            refuse_unbuilt(parsed, ("forward", name))


def test_built_things_are_known_things() -> None:
    assert set(POLICIES) >= built.SOFTMAX
    for policy in built.SOFTMAX:
        given = {"custom": "(weight = s, divide = none)", "entmax": "(1.5)"}
        argument = given.get(policy, "(1)" if POLICY_ARGUMENTS[policy] else "")
        refuse_unbuilt(parse(f"attention x {{ softmax {policy}{argument} }}"))
    for algorithm in built.ALGORITHMS:
        refuse_unbuilt(parse(f"attention x {{ }} schedule {{ algorithm {algorithm} }}"))


def test_targets_are_those_of_the_planner() -> None:
    targets = pytest.importorskip("attncc.targets")
    assert set(TARGETS) == set(targets.TARGETS)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, attncc.frontend; attncc.frontend.parse('attention x {}'); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "sympy", "numpy", "jinja2"} & set(done.stdout.split())


def test_bind_checks_what_it_bakes() -> None:
    text = (
        "attention x(block: const int, w: const int = 2, n: int) { mask k // block == q // (block - w) and k % n > 0 }"
    )
    parsed = parse(text, "c.attn")
    assert bind(parsed, {"block": 8}) == parsed.spec.bind({"block": 8})
    assert bind(parsed, {"block": 8, "w": -1}) == parsed.spec.bind({"block": 8, "w": -1})
    with pytest.raises(KeyError):
        bind(parsed, {})
    for values, code in (
        ({"block": 2}, "E407"),
        ({"block": 1}, "E407"),
        ({"block": 0}, "E407"),
        ({"block": 2**63}, "E105"),
    ):
        with pytest.raises(SpecError, match=f"c.attn:1:13: error {code}: block = {values['block']} "):
            bind(parsed, values)


@pytest.mark.parametrize(
    "mask", ["k < block * 4", "k < -block - block - 9", "k + (1 - block * 2) < 9", "k // (block * 4) == 0"]
)
def test_bind_refuses_ints_beyond_64_bits(mask: str) -> None:
    parsed = parse(f"attention x(block: const int) {{ mask {mask} }}", "c.attn")
    assert bind(parsed, {"block": 2}) == parsed.spec.bind({"block": 2})
    with pytest.raises(SpecError, match=r"c.attn:1:13: error E105: block = 4611686018427387904 makes '.' -?\d+, which"):
        bind(parsed, {"block": 2**62})
