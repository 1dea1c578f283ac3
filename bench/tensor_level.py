"""`python bench/peers.py levels` by its earlier name."""

import typer
from parts.levels import levels

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(levels)

if __name__ == "__main__":
    app()
