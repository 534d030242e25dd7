"""`attncc export`: not built yet."""

from attncc.commands.later import refused

UNTIL = """Until then `build` writes files that need PyTorch and Triton alone, and check themselves when they are run:

\b
    attncc build causal.attn --target sm_90 --out folder"""
command = refused("export", "Write a folder that runs without attncc", UNTIL)
