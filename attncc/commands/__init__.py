"""The commands of the program, one module each; each has a click command called `command`."""
