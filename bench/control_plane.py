"""`python bench/sync.py control-plane` by its earlier name."""

import typer
from sync import control_plane

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(control_plane)

if __name__ == "__main__":
    app()
