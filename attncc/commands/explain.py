"""`attncc explain`: not there yet while its parts are being joined."""

from attncc.commands.later import refused

command = refused("explain", "Say what a spec means and how it would be computed")
