"""`python bench/robustness.py killed-starts` by its earlier name."""

from common import one_command
from robustness import killed_starts as command

app = one_command(command)

if __name__ == "__main__":
    app()
