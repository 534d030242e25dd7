"""Registers the operator `attncc::attention` with PyTorch, for programs that torch.export saved:

    import attncc.ops
    program = torch.export.load("model.pt2")

`import attncc` does the same where torch was imported before it.
"""

from attncc.runtime import operator as operator
