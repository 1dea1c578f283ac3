"""`python bench/peers.py levels` by its earlier name."""

from common import one_command
from parts.levels import levels as command

app = one_command(command)

if __name__ == "__main__":
    app()
