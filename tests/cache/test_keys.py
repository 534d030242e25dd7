"""Keys: every field counts, the text is canonical, and a difference can be told in words."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from attncc.runtime import keys
from attncc.runtime.keys import RequestKey, Toolchain
from tests.cache.cache_samples import KEY, TOOLS, other

REQUEST = RequestKey("attention a {}", "sm_90", (("heads", 16),), None, (("window", 4),), TOOLS)
CHANGES = {
    "spec": "attention b {}", "consts": (("block", 4),), "direction": "backward", "plan": {"tile_q": 64},
    "target": {"name": "sm_80"}, "sizes": (("heads", 8),), "dtype": "f16", "values": (("window", 5),),
    "attncc": "1.1", "triton": "3.9.0", "templates": "ab", "sources": "bc", "flags": (("resources", "no"),),
}  # fmt: skip


@pytest.mark.parametrize("key", [KEY, REQUEST], ids=lambda k: k.kind)
def test_every_field_changes_the_name(key):
    changed = [replace(key, **{f.name: CHANGES[f.name]}) for f in fields(key) if f.name in CHANGES and
               not (f.name == "target" and key.kind == "request")]  # fmt: skip
    for f in fields(Toolchain):
        changed.append(replace(key, toolchain=replace(TOOLS, **{f.name: CHANGES[f.name]})))
    digests = [keys.key_digest(k) for k in (key, *changed)]
    assert len(set(digests)) == len(digests) >= 10


def test_types_of_values_count():
    digests = {keys.key_digest(replace(REQUEST, values=(("window", v),))) for v in (1, 1.0, True)}
    assert len(digests) == 3


def test_canonical_does_not_depend_on_order_of_names():
    assert keys.canonical({"b": 1, "a": (2, 3)}) == keys.canonical({"a": [2, 3], "b": 1}) == '{"a":[2,3],"b":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"x"])
def test_what_has_no_canonical_form_is_refused(value):
    with pytest.raises(TypeError):
        keys.canonical({"x": value})


def test_kinds_do_not_meet():
    assert keys.digest("kernel", {}) != keys.digest("request", {})


def test_differences_name_fields_and_lines():
    new = other(
        spec=KEY.spec.replace("k <= q", "k < q"), toolchain=replace(TOOLS, triton="3.9.0", flags=(("resources", "no"),))
    )
    assert keys.differences(keys.plain(KEY), keys.plain(new)) == [
        "spec, line 2: '    mask k <= q' -> '    mask k < q'",
        "toolchain.flags: [] -> (absent)",
        "toolchain.flags.resources: (absent) -> 'no'",
        "toolchain.triton: '3.7.1' -> '3.9.0'",
    ]


def test_tree_hash_sees_names_contents_and_borders(tmp_path):
    def hash_of(**files):
        folder = tmp_path / keys.digest("t", files)
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.jinja").write_text(text)
        return keys.tree_hash(folder)

    hashes = [hash_of(a="x"), hash_of(b="x"), hash_of(a="y"), hash_of(a="x", b=""), hash_of(a="", b="x")]
    assert len(set(hashes)) == len(hashes)


def test_toolchain_is_stable_and_notices_code_flags(monkeypatch):
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    first = keys.toolchain()
    assert first == keys.toolchain()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert keys.toolchain() != first
    assert keys.toolchain({"resources": "no"}).flags[0] == ("TRITON_DEFAULT_FP_FUSION", "0")
