"""`attncc bench`: not built yet."""

from attncc.commands.later import refused

command = refused("bench", "Time a spec against other kernels")
