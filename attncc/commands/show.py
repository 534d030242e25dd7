"""`attncc show`: not there yet while its parts are being joined."""

from attncc.commands.later import refused

command = refused("show", "Draw the mask with its tile grid")
