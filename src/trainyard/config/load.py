"""Builds one frozen `Run` from a preset, a run file and overrides; reports all problems at once.

preset (shipped)  <  the base in `extends`  <  run.toml  <  section.field=value
"""

from __future__ import annotations

import difflib
import logging
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainyard.config.rules import disagreements
from trainyard.config.run import Run
from trainyard.config.secrets import texts_of
from trainyard.errors import ConfigError
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file

logger = logging.getLogger("trainyard")

COMMAND_LINE = "command line"
MOST_CLOSE = 3
"""If more names share as many words, only one is suggested, by its spelling."""
_DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){100}""")


@dataclass(frozen=True)
class LoadedRun:
    """A run, and the origin of each value that is not a default."""

    run: Run
    origins: dict[str, str]
    """Dotted field name to preset name, file name or "command line"."""


def preset_names() -> list[str]:
    """Lists the shipped presets."""
    return sorted(_presets())


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Reads the shipped presets by name: one a file, or a family with its presets in `presets`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in (resources.files("trainyard.config") / "presets").iterdir():
        tables = parse_toml(entry.read_text(encoding="utf-8"), entry.name)
        family = entry.name.removesuffix(".toml")
        if "presets" not in tables:
            found[family] = tables
        for size, own in tables.pop("presets", {}).items():
            preset = found[f"{family}-{size}"] = {**tables, "name": f"{family}-{size}"}
            text = tables["description"].format_map({"remark": "", **own})
            preset["description"] = textwrap.fill(" ".join(text.split()), 98)
            for section in own.keys() - {"title", "remark"}:
                preset[section] = tables.get(section, {}) | own[section]
    return found


def load_run(source: str, overrides: list[str] | None = None) -> LoadedRun:
    """Reads a preset or a run file and applies `section.field=value` overrides.

    Args:
        source: a preset's name, the path of a TOML file, or a run folder or its name in `runs`.
        overrides: values in TOML syntax; what is not TOML is taken as a plain string.

    Raises:
        ConfigError: names every unknown field, wrong value and conflict, with where each came from.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, values in _layers(source):
        merge_tables(merged, values, name, origins)
    return LoadedRun(_override(merged, overrides or [], origins, source), origins)


def override_run(run: Run, overrides: Sequence[str]) -> Run:
    """Applies `section.field=value` overrides to a run.

    Raises:
        ConfigError: as `load_run`.
    """
    return _override(run.model_dump(mode="json", exclude_none=True), overrides, {}, run.name)


def _override(
    tables: dict[str, Any], overrides: Sequence[str], origins: dict[str, str], source: str
) -> Run:
    for text in overrides:
        merge_tables(tables, _parse_override(text), COMMAND_LINE, origins)
    try:
        return build_run(tables)
    except ValidationError as error:
        raise explain_problems(error, Run, origins, source) from None


def build_run(tables: dict[str, Any]) -> Run:
    """Builds a run from the tables of a run file: checks every field, then the rules across them.

    Raises:
        ValidationError: of pydantic, with the wrong fields or, if there are none, broken rules.
    """
    translated: dict[str, Any] = {}
    merge_tables(translated, tables, "", {})
    return _CHECKED_RUN.validate_python(translated)


def _refuse_nul(tables: Any) -> Any:
    """Refuses texts with a NUL character, which no path and no argument can have."""
    for field, text in texts_of(tables):
        if "\0" in text:
            raise ValueError(f"{field}={text!r} contains a NUL character")
    return tables


def _refuse_broken_rules(run: Run) -> Run:
    if problems := disagreements(run):
        raise ValueError("\n".join(problems))
    return run


_CHECKED_RUN: TypeAdapter[Run] = TypeAdapter(
    Annotated[Run, BeforeValidator(_refuse_nul), AfterValidator(_refuse_broken_rules)]
)


def render_run(run: Run) -> str:
    """Renders a run as a run file with every field."""
    return tomli_w.dumps(run.model_dump(mode="json", exclude_none=True))


def field_value(run: BaseModel, field: str) -> Any:
    """Looks up a dotted field name; None inside an absent section."""
    value: Any = run
    for part in field.split("."):
        value = None if value is None else getattr(value, part)
    return value


def all_fields(section: type[BaseModel] = Run) -> list[str]:
    """Lists every dotted field name of a run file."""
    return [field for field, _, _ in walk_fields(section)]


def walk_fields(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields every dotted field name, with its section and its name there."""
    for name, info in kind.model_fields.items():
        inner = _sections_in(info.annotation)
        if inner and get_origin(info.annotation) is not tuple:
            yield from walk_fields(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name, kind, name


def find_name(name: str, known: Iterable[str]) -> str | None:
    """Finds a known name that is the same but for case, spaces, hyphens and underscores."""
    return next((each for each in known if _fold(each) == _fold(name)), None)


def suggest(name: str, known: list[str]) -> str:
    """Suggests the known names closest to a wrong one, or lists all."""
    close = _closest(name, known)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


def _suggest_preset(name: str) -> str:
    close = _closest(name, preset_names())
    if close:
        return f"did you mean the preset {' or '.join(close)}?"
    return "trainyard show lists the presets"


def _closest(name: str, known: list[str]) -> list[str]:
    """Finds the known names that share most words with a wrong one, else one spelt like it."""
    name = Path(name).name.lower().removesuffix(".toml")
    words, numbers = set(re.findall(r"[\w.]+", name)), re.findall(r"\d{2,}", name)
    shared = {each: (each.startswith(name), len(words & {*each.split("-")})) for each in known}
    best = max(shared.values())
    close = [each for each in known if any(best) and shared[each] == best]
    # "4090-24g" looks like "v100-32g", but a different number is a different device, and so is
    # another first letter, as of "b300" and "mi300x".
    alike = [
        each
        for each in known
        if re.findall(r"\d{2,}", each)[:1] == numbers[:1]
        and (each[:1] == name[:1] or not name[:1].isalpha())
    ]
    if 0 < len(close) <= MOST_CLOSE:
        return close
    return difflib.get_close_matches(name, close or alike, n=1)


def _fold(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


def _layers(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the files of a run, lowest precedence first: its base, if any, then itself."""
    name, values, folder = _read(source, Path())
    base = values.pop("extends", None)
    if base is None:
        return [(name, values)]
    base_name, base_values, _ = _read(str(base), folder)
    if "extends" in base_values:
        raise ConfigError(
            f"{name} extends {base_name}, which itself extends {base_values['extends']}",
            "only one level is allowed: extend a file that extends no other",
        )
    return [(base_name, base_values), (name, values)]


def _read(source: str, folder: Path) -> tuple[str, dict[str, Any], Path]:
    path = folder / source
    if not source.endswith(".toml"):
        files = [each / "run.toml" for each in (path, Path("runs") / path)]  # of a run, by name
        begun = [file for file in files if file.is_file() and source not in preset_names()]
        if not begun:
            source = find_name(source, preset_names()) or source
            return source, _read_preset(source), folder
        path = begun[0]
    try:
        text = read_settings(path, "run file")
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise ConfigError(f"no run file {path}", _suggest_preset(source)) from None
    return str(path), parse_toml(text, str(path)), path.parent


def read_settings(path: Path, kind: str, hint: str = "") -> str:
    """Reads the text of a settings file, such as a "run file".

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_file(path, SETTINGS_LIMIT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the {kind} {path}: {error}", "save it as UTF-8 text"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error.strerror}", hint) from error


def _read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        if Path(name).suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(
                f"{name}: a run file is TOML, and its name ends in .toml",
                "write `a: 1` as `a = 1`, and a section as [train]; docs: trainyard show --fields",
            )
        if Path(name).is_file():
            raise ConfigError(f"{name} is not a run file", "the name of a run file ends in .toml")
        if Path(name).is_dir():
            raise ConfigError(f"no run.toml in the folder {name}", "give a run file or a run")
        raise ConfigError(
            f"no preset named {name!r}",
            _suggest_preset(name) + "; a run file ends in .toml",
        )
    return _presets()[name]


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parses TOML; errors refer to it as `name`.

    Raises:
        ConfigError: it is not valid TOML.
    """
    try:
        if _DEEP_KEY.search(text):  # the parser takes quadratic time
            raise RecursionError
        return tomllib.loads(text.removeprefix("\ufeff"))  # a byte-order mark
    except RecursionError:
        raise ConfigError(f"{name} nests too deeply", "put values in sections, no deeper") from None
    except ValueError as error:  # TOMLDecodeError, or a number with thousands of digits
        is_twice = str(error).startswith("Cannot")
        hint = "give each field once" if is_twice else 'texts need quotes: name = "my-run"'
        raise ConfigError(f"{name} is not valid TOML: {error}", hint) from None


def _parse_override(text: str) -> dict[str, Any]:
    field, equals, value = text.partition("=")
    parts = field.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{text!r} is not of the form section.field=value",
            "for example: train.micro_batch_size=4",
        )
    *parts, last = parts
    try:
        tables = {last: tomllib.loads(f"value = {value}")["value"]}
    except (ValueError, RecursionError):
        tables = {last: value}
    for part in reversed(parts):
        tables = {part: tables}
    return tables


RENAMED = {
    "parallel.replicas": "parallel.data_replicate",
    "kernels.skip_guards": "",
    "kernels.cuda_graph": "",
}
"""Fields of earlier versions by their name today, in the same section; empty: removed, did nothing.

Old run files and checkpoints have them, so entries stay as long as their format is read.
"""


@cache
def _translate(field: str, origin: str) -> str:
    """Returns a field's name today; says it once for each origin that has a name."""
    if origin:
        now = f"is now {RENAMED[field]}" if RENAMED[field] else "no longer exists: it did nothing"
        logger.warning("%s: %s %s", origin, field, now)
    return RENAMED[field]


def merge_tables(
    target: dict[str, Any],
    values: Mapping[str, Any],
    origin: str,
    origins: dict[str, str],
    prefix: str = "",
) -> None:
    """Replaces values field by field, under their names today, and notes where each came from."""
    for key, value in values.items():
        field = prefix + key
        if field in RENAMED:
            field = _translate(field, origin)
            key = field.removeprefix(prefix)
            if not field:
                continue
        if isinstance(value, dict):
            inner = target.get(key)
            if not isinstance(inner, dict):
                inner = target[key] = {}
            merge_tables(inner, value, origin, origins, f"{field}.")
        else:
            target[key] = value
            for inside in [name for name in origins if name.startswith(f"{field}.")]:
                del origins[inside]
        origins[field] = origin


def explain_problems(
    error: ValidationError, model: type[BaseModel], origins: dict[str, str], source: str
) -> ConfigError:
    """Builds one error with every problem that pydantic found, with field and origin.

    Args:
        error: what pydantic raised.
        model: what the values were to become.
        origins: where each dotted field came from.
        source: what the user gave.
    """
    problems = [
        problem
        for problem in error.errors(include_url=False, include_context=False)
        if problem["type"] != "default_factory_not_called"  # other problems are present
    ]
    lines = [line for problem in problems for line in _explain(problem, model, origins)]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(
        f"{count} in the {model.__name__.lower()} {source}:\n"
        + "\n".join(f"  {line}" for line in lines),
        "trainyard show --fields lists every field with its meaning",
    )


def _explain(problem: ErrorDetails, model: type[BaseModel], origins: dict[str, str]) -> list[str]:
    """Rewords a pydantic problem, with one line per field or conflict."""
    field = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if problem["type"] == "extra_forbidden":
        message = f"unknown field; {_suggest_field(field, model)}"
    elif problem["type"] == "missing":
        message = "required field is missing"
    elif problem["type"] == "union_tag_invalid":
        known = problem["msg"].partition("expected tags: ")[2]
        message = f"unknown kind; known: {known} (got {problem['input']['kind']!r})"
    elif problem["type"] in _WANTED:
        message = f"{_WANTED[problem['type']]} (got {problem['input']!r})"
    elif problem["type"] != "value_error":
        message += f" (got {problem['input']!r})"
        if problem["type"] == "literal_error" and isinstance(problem["input"], str):
            values = re.findall(r"'([^']+)'", problem["msg"])
            wanted = _VALUES_ELSEWHERE.get(problem["input"], problem["input"])
            for close in difflib.get_close_matches(wanted, values, n=1):
                message += f"; did you mean {close!r}?"
    if not field:  # conflicts of several fields, which name them themselves
        return [line + _place(line, origins) for line in message.splitlines()]
    return [f"{field}: {message}{_place(field, origins)}"]


_WANTED = {
    "too_short": "needs at least one value",
    "union_tag_not_found": "its kind is missing",
    "model_type": "this is a section, not a value",
    "tuple_type": 'must be a list, such as ["a", "b"] or [1, 2]',
    "string_pattern_mismatch": "use letters, digits and . _ -, and start with a letter or digit",
}


def _place(text: str, origins: dict[str, str]) -> str:
    """Returns the origins of the fields named in a text: the field's own, else its table's."""
    places: dict[str, None] = {}
    for field in re.findall(r"[a-z]\w*(?:\.\w+)*", text):
        while field and field not in origins:
            field = field.rpartition(".")[0]
        if field in origins:
            places[origins[field]] = None
    return f"  [{', '.join(places)}]" if places else ""


_ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "train.global_batch_size",
    "epochs": "train.length",
    "max_steps": "train.length",
    "train_iters": "train.length",
    "hidden_size": "model.d_model",
    "n_embd": "model.d_model",
    "num_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "seq_length": "model.sequence_length",
    "block_size": "model.sequence_length",
    "vocab_size": "model.vocabulary_size",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "cp": "parallel.context",
    "virtual_pipeline": "parallel.chunks",
    "sequence_parallel": "parallel.sequence",
    "data_path": "data.blend.prefixes",
    "path": "data.blend.prefixes",
    "save_interval": "checkpoint.interval",
}
"""What other trainers name a field."""
_VALUES_ELSEWHERE = {"full": "block", "selective": "attention", "swish": "swiglu"}
"""What other trainers name a value."""


def _suggest_field(field: str, model: type[BaseModel]) -> str:
    """Suggests the closest existing field: another trainer's, in the same section, anywhere."""
    if field == "extends":
        return "set it at the top of a run file, not on the command line"
    *parents, name = field.split(".")
    neighbours = _neighbours(parents, model)
    if model is Run and not parents:
        neighbours.append("extends")
    known = all_fields(model)
    close = [_ELSEWHERE[name]] if model is Run and name in _ELSEWHERE else []
    close += [full for full in known if full.rpartition(".")[2] == name]
    section = "".join(f"{parent}." for parent in parents if model is Run)
    close += [section + near for near in difflib.get_close_matches(name, neighbours, n=1)]
    close += difflib.get_close_matches(field, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(neighbours)}"


def _neighbours(parents: list[str], model: type[BaseModel]) -> list[str]:
    """Lists the fields of a section; a step of a list is named by its number and its kind."""
    sections = [model]
    for part in parents:
        if part.isdigit():
            continue
        infos = [section.model_fields.get(part) for section in sections]
        inner = [each for info in infos if info for each in _sections_in(info.annotation)]
        sections = inner or [section for section in sections if _kind_of(section) == part]
    return list(sections[0].model_fields) if sections else []


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Lists the section classes in an annotation such as `Model` or `BatchRamp | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections_in(inner)]


def _kind_of(section: type[BaseModel]) -> str:
    kind = section.model_fields.get("kind")
    return str(get_args(kind.annotation)[0]) if kind else ""
