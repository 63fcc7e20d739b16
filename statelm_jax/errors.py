"""The two kinds of failure that the library tells apart.

`UserError` is for a person at the command line: one line that names the thing and the remedy; the
console script prints it and exits with code 2. `ToolError` is for the model: the environment turns it
into an error observation that the model can act on. Any other exception is a bug and stops the run.
"""

from __future__ import annotations


class UserError(Exception):
    """Bad input from a person: one line, naming what is wrong and what to do about it."""


class ToolError(Exception):
    """A tool call that cannot be carried out; the text is shown to the model as the tool's result."""
