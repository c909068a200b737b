"""A run as a config file says it: the problem, the algorithm and how to train, checked as a whole.

A file and the flags of a command line are two spellings of the same thing: a flag is a key of the file,
and its text a value. Everything that is wrong is said at once.
"""

from fmol.config.calls import call_in_words, call_tables
from fmol.config.choices import ALGORITHMS, CHOICES
from fmol.config.config import Config, ConfigError
from fmol.config.precedence import recommended_options
from fmol.config.reading import read_config, read_file
from fmol.config.run import RunOptions
from fmol.config.source import Source, find_source
from fmol.config.writing import plain_value, toml_value

__all__ = [
    "ALGORITHMS",
    "CHOICES",
    "Config",
    "ConfigError",
    "RunOptions",
    "Source",
    "call_in_words",
    "call_tables",
    "find_source",
    "plain_value",
    "read_config",
    "read_file",
    "recommended_options",
    "toml_value",
]
