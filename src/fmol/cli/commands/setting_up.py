"""Commands for before the first run: what there is, and what to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from fmol.cli.arguments import FOLDER, data_option
from fmol.cli.doctor import check_up, list_problems
from fmol.cli.flags import ProblemType

__all__ = ["completion", "doctor", "new_flower_app", "problems"]


@click.command()
@click.argument("name", required=False, type=ProblemType())
@data_option
def problems(name: str | None, data_dir: Path | None) -> None:
    """Lists the built-in problems and whether their data are found; with NAME, its options."""
    click.echo("\n".join(list_problems(name, data_dir)))


@click.command()
@data_option
def doctor(data_dir: Path | None) -> None:
    """Says what is installed and found: versions, devices, extras, data."""
    click.echo("\n".join(check_up(data_dir)))


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
def new_flower_app(folder: Path) -> None:
    """Writes a small, complete Flower app into the new folder DIR: a server, sites, one task.

    It runs as it stands, simulated and across machines; its README says how.
    """
    from fmol.flower.new_app import write_app  # Where it is used: flwr is no part of the core.

    files = write_app(folder)
    click.echo("\n".join(map(str, files)))
    click.echo(f"Run it: flwr run {shlex.quote(str(folder))} --stream")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints what makes SHELL complete fmol's commands, flags and their values.

    For bash: put `eval "$(fmol completion bash)"` into ~/.bashrc; alike for zsh. For fish:
    fmol completion fish > ~/.config/fish/completions/fmol.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "fmol", "_FMOL_COMPLETE").source())
