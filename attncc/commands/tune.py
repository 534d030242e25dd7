"""`attncc tune`: not built yet."""

from attncc.commands.later import refused

command = refused("tune", "Search for the fastest plan on this GPU, and keep it")
