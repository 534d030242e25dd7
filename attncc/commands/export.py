"""`attncc export`: not built yet."""

from attncc.commands.later import refused

command = refused("export", "Write a folder that runs without attncc")
