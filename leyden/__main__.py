"""`python -m leyden` is the `leyden` command."""

from leyden.cli import app

if __name__ == "__main__":
    app(prog_name="leyden")
