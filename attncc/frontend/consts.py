"""Words and limits of the language, as plain data."""

from __future__ import annotations

import keyword

from attncc.ir import BUILTINS, ELEMENTS, FUNCTIONS

STATEMENTS = ("let", "mask", "score", "scale", "weight", "dropout", "align", "softmax")
SECTIONS = ("precision", "schedule", "layout")
RESERVED = frozenset(
    (*STATEMENTS, *SECTIONS, "attention", "const", "sorted", "grad", "not", "and", "or", "true", "false")
)
CALL_ARGUMENTS = frozenset((  # and every return_…
    "self", "q", "k", "v", "seed", "deterministic", "validate", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k", "text", "filename", "path", "target",
))  # fmt: skip
PYTHON_KEYWORDS = frozenset(keyword.kwlist)
SCALARS = ("int", "float")
TYPES = (*SCALARS, *ELEMENTS)

# Blocks and what may stand in them.
INPUTS = ("bf16", "f16", "f32", "f8e4m3", "f8e5m2")
PRECISION = {"inputs": INPUTS, "products": ("ieee", "tf32"), "accumulate": ("f32",)}
SCALES = ("per_tensor", "per_head", "per_block")
ROTATE = ("hadamard", "none")
ALGORITHMS = ("standard", "fa1", "fa2", "fa3", "split_kv")
LOOPS = ("q_outer", "kv_outer")
TARGETS = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
SETTINGS = {
    "precision": (*PRECISION, "scales", "rotate"),
    "schedule": ("algorithm", "loop", "tile", "stages", "warps"),
    "layout": ("q", "kv", "v", "rows"),
}
FORMS = ("dense", "ragged", "paged")
QUANTISED = ("int8", "int4", "f8e4m3", "f8e5m2")
QUANTISED_SCALES = ("token", "head", "tensor", "channel")
POLICY_ARGUMENTS: dict[str, tuple[str, ...]] = {  # what each argument is, in order; `custom` takes its two by name
    "online": (), "two_pass": (), "sink": ("E",), "off_by_one": (), "unified": ("E",), "sigmoid": ("E",),
    "relu": ("n",), "sparsemax": (), "entmax": ("alpha",), "none": (), "custom": ("weight", "divide"),
}  # fmt: skip

# Limits. The depth keeps every recursive walk of an expression far below Python's own limit.
MAX_TEXT = 32_768  # characters
MAX_NESTING = 32  # open brackets and unary operators around one token
MAX_NODES = 4096  # of one expression after inlining, and of all scores put into one another
MAX_TOTAL = 16_384  # nodes of the whole spec
MAX_DEPTH = 100
MAX_NAME = 64
MAX_PARAMS = 64
MAX_AXES = 8
MAX_LETS = 256
MAX_STATEMENTS = 32  # masks, or scores
MAX_POWER = 8  # of relu
MAX_FAULTS = 100
TILES = (16, 1024)  # powers of two between
WARPS = (1, 16)
STAGES = (1, 8)

FUNCTION_NAMES = tuple(FUNCTIONS)
BUILTIN_NAMES = tuple(BUILTINS)
