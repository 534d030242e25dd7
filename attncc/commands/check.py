"""`attncc check`: not there yet while its parts are being joined."""

from attncc.commands.later import refused

command = refused("check", "Compare a spec's numbers with float64")
