"""A run as one record, complete: every option has its value, and it can be written as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fmol.config.run import RunOptions
from fmol.config.writing import option_lines, option_values, toml_value
from fmol.errors import MisuseError
from fmol.federation import Federation
from fmol.rounds import Algorithm

__all__ = ["Config", "ConfigError"]


class ConfigError(MisuseError):
    """All that is wrong with a config, a sentence each in `problems`."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "1 thing is" if len(problems) == 1 else f"{len(problems)} things are"
        super().__init__("\n".join([f"{head} wrong with the configuration:", *problems]))


@dataclass(frozen=True)
class Config:
    """A run, complete: every option has its value."""

    problem: str
    """The name of a built-in problem, or `module:name` of one's own."""
    problem_options: Any
    """The problem's dataclass; `build(data_dir)` gives the federation."""
    algorithm: str
    algorithm_options: Algorithm
    run: RunOptions
    notes: tuple[str, ...] = ()
    """What was not taken as given, in words."""
    problem_file: Path | None = None
    """The file that the problem is in, where it is named by one."""

    def build(self) -> Federation:
        """The federation to train."""
        built = self.problem_options.build(self.run.data_dir)
        if not isinstance(built, Federation):
            raise ConfigError(
                [
                    f"`{self.problem}` gave a {type(built).__name__} where a Federation was "
                    "expected. Return fmol.Federation(…) from it."
                ]
            )
        return built

    @cached_property
    def tables(self) -> dict[str, Any]:
        """Every option as a config file has it: run options, and a table for problem and algorithm."""
        return {
            **option_values(self.run),
            "problem": {"name": self.problem, **option_values(self.problem_options)},
            "algorithm": {"name": self.algorithm, **option_values(self.algorithm_options)},
        }

    def to_toml(self) -> str:
        """The config as a file that explains itself, and that reads back as the same config."""
        lines = option_lines(self.run)
        for table, name, options in (
            ("problem", self.problem, self.problem_options),
            ("algorithm", self.algorithm, self.algorithm_options),
        ):
            lines += ["", f"[{table}]", f"name = {toml_value(name)}", *option_lines(options)]
        return "\n".join(lines) + "\n"
