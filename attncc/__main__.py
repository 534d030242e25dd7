"""`python -m attncc` is the program `attncc`."""

from attncc.cli import main

main()
