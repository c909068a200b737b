"""The command `fmol`, which has all others."""

from __future__ import annotations

from typing import Any

import click

import fmol as package
from fmol.cli.commands.paper import rates, reproduce_command
from fmol.cli.commands.results import compare, report
from fmol.cli.commands.setting_up import completion, doctor, new_flower_app, problems
from fmol.cli.commands.training import front, resume_command, run, sweep
from fmol.cli.exits import errors, terminable

__all__ = ["fmol"]


class Commands(click.Group):
    """The commands, all of which say what goes wrong in one way, from the arguments on."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors(), terminable():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: fmol run multidigits",
)
@click.version_option(package.__version__, prog_name="fmol")
def fmol() -> None:
    """Federated multi-objective learning: many clients, each with its own objectives, one model."""


for command in (
    run,
    resume_command,
    report,
    compare,
    sweep,
    front,
    rates,
    reproduce_command,
    new_flower_app,
    problems,
    doctor,
    completion,
):
    fmol.add_command(command)
