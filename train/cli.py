"""The console script `statelm`: one table of subcommands, each a frozen config and a function of it.

The life of a call:

1. The first word picks a row of `COMMANDS`; only now is that command's module imported, so that the general
   help needs neither JAX nor tyro.
2. `--config FILE.toml`, where given, is read and checked; its values become the defaults.
3. tyro reads the flags (`--a.b value`, the same paths as in the file) over those defaults, and writes `--help`,
   which therefore shows the values that would hold.
4. The outcome is validated once, by the rules of the config itself.
5. The command's `main(config)` runs. Its return value is the exit code; None means 0.

Exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted; 141 the reader of our output has gone. Any
other exception is a bug: it keeps its traceback. `--traceback` or STATELM_TRACEBACK=1 shows the trace behind a
one-line error as well.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, get_type_hints

from statelm_jax.config import Config, did_you_mean, key_paths, load_toml, validate, validate_partial
from statelm_jax.errors import UserError

if TYPE_CHECKING:
    from tyro.constructors import StructConstructorSpec, StructTypeInfo


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table: `module` holds the config class and `main(config) -> int | None`."""

    module: str
    config: str
    summary: str

    def load(self) -> tuple[type[Config], Callable[[Any], int | None]]:
        """Import the module; return its config class and its main function."""
        module = importlib.import_module(self.module)
        return getattr(module, self.config), module.main


COMMANDS: Mapping[str, Command] = {
    "demo": Command("statelm_jax.train.demo", "DemoConfig", "train a tiny StateLM from nothing, evaluate it, report"),
    "ask": Command("statelm_jax.train.ask", "AskConfig", "put a question about a document to a trained model"),
    "view": Command("statelm_jax.train.view", "ViewConfig", "turn a run or its trajectories into one HTML page"),
    "tasks": Command("statelm_jax.train.tasks", "TasksConfig", "write needle tasks over any text as JSON lines"),
    "sft": Command("statelm_jax.train.sft", "SftConfig", "train on what an expert did in the environment"),
    "evaluate": Command("statelm_jax.train.evaluate", "EvaluateConfig", "let a checkpoint act by itself and score it"),
}

_USAGE = """\
usage: statelm COMMAND [--config FILE.toml] [--section.key value ...]

StateLM reads documents far longer than its window, because it edits its own context.

{commands}

Begin with `statelm demo`, then `statelm ask --document FILE --question TEXT`.
Every setting has one name: key `b` of section [a] in a TOML file is `--a.b` on the command line, and the command
line wins. `statelm COMMAND --help` lists them with the values that would hold.

  --config FILE.toml   read settings from this file first
  --traceback          show where a one-line error came from
  --version            print the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    verbose = "--traceback" in args or os.environ.get("STATELM_TRACEBACK", "") not in ("", "0")
    try:
        code = _dispatch([arg for arg in args if arg != "--traceback"])
        sys.stdout.flush()
        return code
    except UserError as error:
        if verbose:
            traceback.print_exc()
        _complain(f"error: {error}")
        return 2
    except KeyboardInterrupt as interrupt:
        if verbose:
            traceback.print_exc()
        _complain(": ".join(["interrupted", *map(str, interrupt.args)]))
        return 130
    except BrokenPipeError:
        # `statelm ... | head`: nothing is wrong. Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(name: str, config_class: type[Config], args: Sequence[str]) -> Config:
    """The checked config of command `name`, from the file that `--config` names and the flags over it.

    `--help` prints and raises `SystemExit(0)`. Everything wrong with the input raises `UserError`.
    """
    import tyro  # takes a fifth of a second: not for the general help

    file, flags = _take_option(args, "--config")
    defaults = validate_partial(config_class, load_toml(Path(file)) if file else {}, file or name)
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(_section_rule)
    with _one_line_errors(name, config_class):
        values, unknown = tyro.cli(
            config_class,
            prog=f"statelm {name}",
            description=_description(config_class),
            args=flags,
            default=defaults,
            use_underscores=True,  # flags are spelled like the keys of the file
            return_unknown_args=True,
            config=(tyro.conf.HelptextFromCommentsOff,),
            registry=registry,
        )
    if unknown:
        _refuse_unknown(name, config_class, unknown)
    # _section_rule made tyro return a plain nested dict.
    return validate(config_class, values, name)  # pyright: ignore[reportArgumentType]


def _dispatch(args: list[str]) -> int:
    name, *rest = args or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_USAGE.format(commands=_command_list()), end="")
        return 0
    if name == "--version":
        print(f"statelm {_version()}")
        return 0
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise UserError(f"unknown {kind} {name!r}{did_you_mean(name, COMMANDS)} (statelm --help lists the commands)")
    from statelm_jax.train.host import tune_host  # of no use to the general help

    tune_host()
    config_class, run = COMMANDS[name].load()
    return run(parse(name, config_class, rest)) or 0


def _command_list() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:<{width}}   {command.summary}" for name, command in COMMANDS.items())


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("statelm-jax")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _complain(line: str) -> None:
    print("statelm: " + " ".join(line.split()), file=sys.stderr)


def _description(config_class: type[Config]) -> str:
    return inspect.cleandoc(config_class.__doc__ or "") + "\n--config FILE.toml sets the defaults shown here."


def _take_option(args: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Cut `option VALUE` or `option=VALUE` out of `args`: its value, or None, and the rest."""
    found: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == option:
            found.append(next(words, ""))
        elif word.startswith(option + "="):
            found.append(word.partition("=")[2])
        else:
            rest.append(word)
    if len(found) > 1 or not all(found):
        raise UserError(f"{option} wants one file" + (f", not {len(found)}" if len(found) > 1 else ""))
    return (found[0] if found else None), rest


def _section_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """How tyro takes a `Config` apart: it collects values in a `dict`, and pydantic alone decides what is right."""
    from tyro import MISSING
    from tyro.constructors import StructConstructorSpec, StructFieldSpec

    if not (isinstance(info.type, type) and issubclass(info.type, Config)):
        return None
    hints = get_type_hints(info.type, include_extras=True)
    defaults = info.default if isinstance(info.default, Config) else info.type.model_construct()
    fields = (
        StructFieldSpec(name, hints[name], default=getattr(defaults, name, MISSING), helptext=field.description)
        for name, field in info.type.model_fields.items()
    )
    return StructConstructorSpec(instantiate=dict, fields=tuple(fields))


def _one_line_errors(name: str, config_class: type[Config]) -> AbstractContextManager[None]:
    """A context in which tyro's complaints become a `UserError` instead of a panel on stderr.

    tyro's hook for this is not public yet. A release that lacks it, or whose events have changed, falls back to
    tyro's own panel (and its exit code, also 2); tests/test_cli.py notices.
    """
    try:
        from tyro._errors import BadValue, InstantiationFailure, InvalidChoice, MissingArgs, on_parse_error
    except ImportError:
        return nullcontext()

    def complain(event: object) -> None:
        match event:
            case MissingArgs(missing_arguments=missing, unrecognized_tokens=tokens):
                if tokens:
                    _refuse_unknown(name, config_class, tokens)
                flags = ", ".join(context.arg.display_name() for context in missing)
                raise UserError(f"{name}: missing {flags} (statelm {name} --help explains)")
            case InvalidChoice(argument=argument, value=value, choices=choices):
                raise UserError(f"{name}: {argument.display_name()} is one of {', '.join(choices)}, not {value!r}")
            case BadValue(argument=argument):
                raise UserError(f"{name}: {argument.display_name()} wants {argument.lowered.metavar}")
            case InstantiationFailure(argument=argument, message=message) if argument is not None:
                raise UserError(f"{name}: {argument.display_name()}: {message}")

    return on_parse_error(complain)


def _refuse_unknown(name: str, config_class: type[Config], tokens: Sequence[str]) -> Never:
    """Tokens that tyro could not place: name the first flag among them and the nearest real one."""
    flag = next((token for token in tokens if token.startswith("-")), None)
    if flag is None:
        raise UserError(f"{name}: unexpected argument {tokens[0]!r} (statelm {name} --help shows what it takes)")
    flag = flag.partition("=")[0]
    keys = list(key_paths(config_class))
    leaves = [key for key in keys if not any(other.startswith(key + ".") for other in keys)]
    known = [*leaves, "config", "help", "traceback"]
    near = did_you_mean(flag.lstrip("-").replace("-", "_"), known).replace("mean '", "mean '--")
    raise UserError(f"{name}: unknown flag {flag}{near} (statelm {name} --help lists them)")


if __name__ == "__main__":
    sys.exit(main())
