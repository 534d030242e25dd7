"""The tables of the README's section "Measured" and of docs/ladder.md, from results/*.json.

`python benchmarks/tables.py` prints them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PEERS = {"flex": "FlexAttention", "cudnn": "cuDNN", "flash": "FlashAttention-2"}  # the last two through PyTorch's SDPA
BESIDE = {"deterministic": "with equal bits", **PEERS}  # what else of ours stands in a table


def forward(record: dict[str, Any]) -> list[str]:
    """TFLOP/s of each row, and how many times the best of its peers that is."""
    there = {name: title for name, title in BESIDE.items() if any(name in row["tflops"] for row in record["rows"])}
    lines = [_cells("row", "attncc", *there.values(), "of the best peer"), "|---" * (len(there) + 3) + "|"]
    for row in record["rows"]:
        rates = row["tflops"]
        best = max((rate for name, rate in rates.items() if name in PEERS), default=0.0)
        shown = (f"{rates[n]:.0f}" if n in rates else "-" for n in ("attncc", *there))
        lines.append(_cells(row["row"], *shown, f"{rates['attncc'] / best:.2f}" if best else "-"))
    return lines


def specialised(record: dict[str, Any]) -> list[str]:
    """TFLOP/s of the warp-specialised kernels, as planned and with the running maximum where that was measured."""
    there = {name: title for name, title in PEERS.items() if any(name in row["tflops"] for row in record["rows"])}
    lines = [_cells("row", "attncc", "with the running maximum", *there.values()), "|---" * (len(there) + 3) + "|"]
    for row in record["rows"]:
        rates = row["tflops"]
        shown = (f"{rates[n]:.0f}" if n in rates else "-" for n in ("attncc", "attncc_running", *there))
        lines.append(_cells(row["row"], *shown))
    return lines


def backward(record: dict[str, Any]) -> list[str]:
    """As for the forward pass, of the dense rows."""
    return forward({**record, "rows": [row for row in record["rows"] if row["part"] == "dense"]})


def new_masks(record: dict[str, Any]) -> list[str]:
    """Milliseconds of a call with a new length and a new mask, and how many times ours each form of a peer takes.

    Ours as planned, with what of it passes until the call returns, and with other algorithms.
    """
    names = list(record["rows"][0]["ms"])
    forms = [n for n in names if n.startswith("flex")]
    others = [n for n in names if n not in ("attncc", *forms)]
    host = ["of it on the host"] if "host_ms" in record["rows"][0] else []
    titles = ("row", "attncc", *host, *others, *(n.replace("flex", PEERS["flex"]) for n in forms))
    lines = [_cells(*titles), "|---" * len(titles) + "|"]
    for row in record["rows"]:
        ours = row["ms"]["attncc"]
        times = [ours, *([row["host_ms"]["attncc"]] if host else []), *(row["ms"][n] for n in others)]
        beside = (f"{row['ms'][n]:.2f} ({row['ms'][n] / ours:.1f})" for n in forms)
        lines.append(_cells(row["row"], *(f"{ms:.2f}" for ms in times), *beside))
    return lines


def host(record: dict[str, Any]) -> list[str]:
    """Microseconds of a call on the host, beside those of Triton's own launch with the same arguments."""
    lines = [_cells("spec", "rows", "call", "launch alone", "beyond it"), "|---|---|---|---|---|"]
    for row in record["rows"]:
        times = (f"{row[n]:.0f}" for n in ("call_us", "launch_us", "beyond_us"))
        lines.append(_cells(row["spec"], str(row["length"]), *times))
    return lines


def start(record: dict[str, Any]) -> list[str]:
    """Seconds from a spec's text to its first result: with nothing cached, how much of it was compiling, and cached."""
    lines = [_cells("spec", "kernel", "new", "of it Triton compiles", "from the cache"), "|---" * 5 + "|"]
    for row in record["rows"]:
        begun = next((begin for name, begin, _ in row["stages"] if name == "load_module"), None)
        ended = max((begin + took for name, begin, took in row["stages"] if name == "make_cubin"), default=None)
        compiling = f"{ended - begun:.1f}" if begun is not None and ended is not None else "-"
        new, cached = (row[n]["first_result_s"] - row[n]["import_s"] for n in ("cold", "cached"))
        lines.append(
            _cells(f"{row['spec']} D{row['head_dim']}", row["algorithm"], f"{new:.1f}", compiling, f"{cached:.2f}")
        )
    return lines


def ladder(record: dict[str, Any]) -> list[list[str]]:
    """Of results/io.json: time, bytes of HBM and memory of each rung by length, then the other cases."""
    rungs: dict[str, dict[int, dict[str, Any]]] = {}
    for row in record["rows"]:
        case = row["case"]
        if (case["heads"], case["head_dim"], case["spec"], case["tile_k"]) == (4, 128, "full", None):
            rungs.setdefault(f"{case['algorithm']} {case['direction']}", {})[case["length"]] = row
    lengths = sorted({n for rows in rungs.values() for n in rows})
    made = []
    for told in (_milliseconds, _traffic, _beyond):
        lines = [_cells("length", *rungs), "|---" * (len(rungs) + 1) + "|"]
        lines += [_cells(f"{n // 1024}K", *(told(rows.get(n)) for rows in rungs.values())) for n in lengths]
        made.append(lines)
    counted = [row for row in record["rows"] if row.get("ratio")]
    lines = [_cells("case", "counted", "predicted", "predicted / counted"), "|---|---|---|---|"]
    for row in counted:
        if row["row"] not in {r["row"] for rows in rungs.values() for r in rows.values()}:
            guess = row["model"]["hbm_bytes"]
            lines.append(_cells(row["row"], _bytes(row["measured_bytes"]), _bytes(guess), f"{row['ratio']:.2f}"))
    return [*made, lines]


def _milliseconds(row: dict[str, Any] | None) -> str:
    return "-" if row is None or "ms" not in row else f"{row['ms']:.3g}"


def _traffic(row: dict[str, Any] | None) -> str:
    if row is None or not row.get("measured_bytes"):
        return "-"
    return f"{_bytes(row['measured_bytes'])} ({_bytes(row['model']['hbm_bytes'])})"


def _beyond(row: dict[str, Any] | None) -> str:
    return "-" if row is None or "beyond_bytes" not in row else _bytes(row["beyond_bytes"])


def _bytes(number: float) -> str:
    """Three digits and a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def made_with(record: dict[str, Any]) -> str:
    """The machine and versions of a record."""
    torch, device = record["torch"].split("+")[0], record["device"].removeprefix("NVIDIA ")
    triton = f", Triton {record['triton']}" if "triton" in record else ""
    return f"{device}, PyTorch {torch}{triton}, {record['date']}"


def tables() -> dict[str, list[str]]:
    """Lines for each record that is there, by its file's name: what it was made with, then a table."""
    made = {}
    shown = {
        "forward_fa3.json": specialised, "forward.json": forward, "masks.json": new_masks,
        "backward_fa3.json": backward, "backward.json": backward,
        "host.json": host, "start.json": start,
    }  # fmt: skip
    for name, table in shown.items():
        if (RESULTS / name).is_file():
            record = _read(name)
            made[name] = [made_with(record), *table(record)]
    return made


def planner(record: dict[str, Any]) -> list[str]:
    """The first choice's part of the speed of the fastest that was measured, of all plans and of those of fa2."""
    lines = [_cells("row", "plans", "of the fastest", "fa2's first choice, of the fastest fa2"), "|---|---|---|---|"]
    for row in record["rows"]:
        shares = (f"{row[n]:.2f}" if row[n] else "-" for n in ("share", "share_fa2"))
        out = f", {row['beyond']} left out" if row.get("beyond") else ""
        lines.append(_cells(row["row"], f"{row['measured']} of {row['plans']}{out}", *shares))
    return lines


def predictions(record: dict[str, Any]) -> str:
    """Median errors of predicted times, by pass, and over how many calls."""
    told = []
    for name in ("forward", "backward"):
        errors = [abs(row[name]["predicted_ms"] / row[name]["ms"] - 1) for row in record["rows"] if name in row]
        told.append(f"{name} {100 * statistics.median(errors):.0f}% over {len(errors)} calls")
    return ", ".join(told)


LADDER_TITLES = (
    "Milliseconds of a call:", "Bytes of HBM, counted (predicted):", "Memory beyond inputs and results:",
    "Bytes of HBM of other calls:", "The planner's first choice, as a part of the speed of the fastest plan measured:",
)  # fmt: skip


def ladder_page() -> list[str]:
    """The tables of docs/ladder.md with their titles, those that have figures."""
    made = [*ladder(_read("io.json")), planner(_read("planner.json"))]
    lines: list[str] = []
    for title, table in zip(LADDER_TITLES, made, strict=True):
        if any(char.isdigit() for row in table[2:] for char in row.split("|", 2)[2]):
            lines += ["", title, "", *table]
    return lines[1:]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def _cells(*texts: str) -> str:
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    for record_name, record_lines in tables().items():
        print(record_name, *record_lines, "", sep="\n")
    print(*ladder_page(), "", sep="\n")
    print(f"predicted times: {predictions(_read('predict.json'))}")
