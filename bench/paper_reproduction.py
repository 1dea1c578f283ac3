"""`python bench/paper.py reproduction` by its earlier name."""

from common import one_command
from parts.reproduction import command

app = one_command(command)

if __name__ == "__main__":
    app()
