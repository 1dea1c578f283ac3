"""`python bench/paper.py reproduction` by its earlier name."""

import typer
from parts.reproduction import command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(command)

if __name__ == "__main__":
    app()
