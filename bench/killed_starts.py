"""`python bench/robustness.py killed-starts` by its earlier name."""

import typer
from robustness import killed_starts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(killed_starts)

if __name__ == "__main__":
    app()
