"""Turns the flags of Megatron's GPT pretraining into a run file that accounts for each of them.

The table of flags is config/megatron_flags.toml; docs/megatron-flags.md is written from it.
`Conversion` has the rules that a table cannot say. The run file states Megatron's values of absent
flags too: Trainyard's defaults are the paper's.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path, PurePath
from typing import Any

import tomli_w
from pydantic import ValidationError

from trainyard.config.load import build_run, explain_problems, parse_toml
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.export.foreign import KINDS, classify, flag_table, is_default
from trainyard.export.shell_script import UNRESOLVED, dropped_lines, read_command, split_command
from trainyard.files import SETTINGS_LIMIT_BYTES, read_file

OF_A_MODEL = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
REQUIRED = (*OF_A_MODEL, "lr", "micro-batch-size", "global-batch-size")
SPLITS = ("train", "valid", "test")
UNITS = {"iters": "steps", "samples": "sequences", "tokens": "tokens"}
GROUPS = ("moe-router-num-groups", "moe-router-group-topk")
LOSS_SCALE = ("initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")
_BLOCKS = r"\[[01](?:,[01])*\](?:\*\d{1,4})?"  # a list of Python, like [0,0] or [1]*24


@dataclass
class Imported:
    """A run file, and what its user should read."""

    text: str
    warnings: list[str] = field(default_factory=list)


def import_command(source: str, settings: list[str], name: str) -> Imported:
    """Imports a command line, or a script with its arguments ("train.sh bf16"), as a run file.

    Args:
        source: the command line, or the path of a script and its arguments.
        settings: variables of the script, as NAME=value.
        name: of the run.

    Raises:
        ConfigError: as `import_arguments` and `read_command`.
    """
    files: dict[str, str] = {}
    notes: list[str] = []
    words = split_command(source.removeprefix("bash "))
    path, *arguments = words or [""]
    if re.search(r"\.(sh|bash|sbatch|slurm|pbs)$", path) or Path(path).is_file():
        if wrong := [text for text in settings if "=" not in text]:
            raise ConfigError(f"--set {wrong[0]} is not of the form NAME=value")
        try:
            text = read_file(Path(path), SETTINGS_LIMIT_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", "give a script") from None
        variables = dict(text.split("=", 1) for text in settings)
        words, files = read_command(text, arguments, variables)
        notes = dropped_lines(text)
    imported = import_arguments(words, files, name)
    return Imported(imported.text, notes + imported.warnings)


def import_arguments(words: list[str], files: Mapping[str, str], name: str) -> Imported:
    """Converts a command line to a run file.

    Args:
        words: the flags with their values; words before the first flag are ignored.
        files: files that a script would write, by path: DeepSpeed's settings.
        name: of the run.

    Raises:
        ConfigError: flags that change the model or its training in a way that is not supported,
            required flags that are absent, or values that do not make a run.
    """
    flags = _read_flags(words)
    for flag, values in flags.items():
        unresolved = UNRESOLVED.search(flag + " ".join(values))
        is_needed = UNRESOLVED.search(flag) or classify(flag)[0] in ("field", "rule")
        if unresolved and is_needed and flag != "tensorboard-dir":
            raise _explain_unresolved(unresolved[1], flag)
    flags = {flag: [UNRESOLVED.sub(r"<\1>", v) for v in values] for flag, values in flags.items()}
    accounts = _account(flags)
    run = Conversion(flags, files)
    fields, origins = run.convert()
    try:
        build_run({"name": name} | nest(fields))
    except ValidationError as error:
        raise explain_problems(error, Run, origins, "of these flags") from None
    text = _render(name, fields, origins, [*accounts, *run.notes])
    parse_toml(text, "the new run file")
    return Imported(text, run.notes)


def nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields, by name with dots, as tables."""
    tables: dict[str, Any] = {}
    for key, value in fields.items():
        *parents, last = key.split(".")
        table = tables
        for part in parents:
            table = table.setdefault(part, {})
        table[last] = value
    return tables


def _explain_unresolved(name: str, flag: str) -> ConfigError:
    what, hint = name.replace("\ue000", "$"), f"set the variable: --set {name}=value "
    hint += "(`source FILE`, functions and loops are not followed)"
    if name.isdecimal():
        what = f"${name}, an argument of the script"
        hint = 'give the arguments after the script, in the same quotes: "train.sh ARGUMENT ..."'
    return ConfigError(f"cannot resolve {what}, which --{flag} needs", hint)


def _read_flags(words: list[str]) -> dict[str, list[str]]:
    """Groups words by flag, without dashes in front and with hyphens only; the last one wins."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = flags[name.replace("_", "-")] = [value] if equals else []
        else:
            values.append(word)
            if not flags and UNRESOLVED.search(word):
                flags[word] = values = []
    if not flags:
        raise ConfigError("no flags of Megatron, such as --num-layers 24", "give its command line")
    return flags


def _account(flags: Mapping[str, list[str]]) -> list[str]:
    """Returns a line for each flag that sets no field."""
    accounts, refused = [], []
    known = [flag for kind in KINDS for flag in flag_table()[kind]]
    for flag, values in flags.items():
        kind, reason = classify(flag)
        shown = " ".join([f"--{flag}", *values])
        accepted = flag_table()["value"].get(flag)
        if kind.startswith("refused") and values and is_default(flag, " ".join(values)):
            accounts.append(f"{shown}: Megatron's default")
        elif kind.startswith("refused") or (accepted and values[:1] and values[0] not in accepted):
            but = f"; supported: {', '.join(accepted)}" if accepted else ""
            refused.append(f"  {shown}: {reason}{but}")
        elif kind in ("same", "none"):
            accounts.append(f"{shown}: {reason}")
        elif kind not in ("field", "rule"):
            near = difflib.get_close_matches(flag, known, n=1)
            guess = f"; did you mean --{near[0]}?" if near else ""
            refused.append(f"  {shown}: unknown flag{guess}")
    if refused:
        raise ConfigError(
            "not supported:\n" + "\n".join(refused),
            "remove these flags for the nearest run that Trainyard trains; "
            "docs/megatron-flags.md lists all",
        )
    return accounts


def _render(
    name: str, fields: Mapping[str, Any], origins: Mapping[str, str], accounts: list[str]
) -> str:
    lines = ["# Written by trainyard import --from megatron-args; docs/megatron-flags.md."]
    lines.append(tomli_w.dumps({"name": name}).strip())
    sections: dict[str, list[str]] = {}
    for key, value in fields.items():
        section, _, leaf = key.rpartition(".")
        text = tomli_w.dumps({leaf: value}, multiline_strings=False).strip()
        if isinstance(value, list):
            text = f"{leaf} = [{', '.join(json.dumps(item) for item in value)}]"
        sections.setdefault(section, []).append(f"{text} # {origins[key]}")
    order = list(Run.model_fields)
    for section in sorted(sections, key=lambda name: (order.index(name.partition(".")[0]), name)):
        lines += ["", f"[{section}]", *sections[section]]
    if accounts:
        lines += ["", "# The same by default, or without meaning here:"]
        lines += [f"#   {' '.join(line.split())}" for line in accounts]
    return "\n".join(lines) + "\n"


class Conversion:
    """From flags to fields. Megatron's rule is beside each value that is not a plain copy."""

    def __init__(self, flags: Mapping[str, list[str]], files: Mapping[str, str]) -> None:
        self.flags = flags
        self.notes: list[str] = []
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.deepspeed = self._read_deepspeed(files)

    def convert(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the value of each field, and the flags that it follows from."""
        for flag in REQUIRED:
            self.text(flag)
        self._copy_numbers()
        self.set("log.tensorboard", self.has("tensorboard-dir"), "tensorboard-dir")
        if self.has("wandb-project"):
            self.set("log.wandb_project", self.text("wandb-project"), "wandb-project")
        self._set_given("train.")
        self._model()
        self._experts()
        self._optimizer()
        self._data()
        self._schedule()
        self._parallel()
        self._sharding()
        self._precision()
        return self.fields, self.origins

    def has(self, flag: str) -> bool:
        """Whether a flag is given."""
        return flag in self.flags

    def text(self, flag: str) -> str:
        """Returns the one value of a flag, or Megatron's default."""
        values = self.flags.get(flag, [str(flag_table()["default"].get(flag, ""))])
        if len(values) != 1 or not values[0]:
            problem = f"needs one value (got {values})" if self.has(flag) else "is not given"
            raise ConfigError(f"--{flag} {problem}", "Megatron-LM requires it")
        return str(values[0])

    def number(self, flag: str) -> int | float:
        """Returns the one number of a flag, or Megatron's default."""
        text = self.text(flag)
        value = _decimal(text, f"--{flag}")
        return int(value) if re.fullmatch(r"[+-]?\d+", text) else float(value)

    def count(self, flag: str) -> int:
        """Returns the one number of a flag, a whole one above 0, or Megatron's default."""
        return _count(self.text(flag), f"--{flag}")

    def setting(self, place: str, default: float | None) -> float:
        """Returns a number of DeepSpeed's settings, such as `fp16.hysteresis`.

        Args:
            place: its keys.
            default: of what is absent; None to take absent, null and 0 as infinity.
        """
        value: Any = self.deepspeed
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else value and "no table"
        if value is None or (default is None and value == 0):
            return float("inf") if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2**31:
            raise ConfigError(
                f"--deepspeed_config: {place} needs a number (got {value!r})",
                "write the number that the training used",
            )
        return value

    def set(self, field: str, value: Any, *flags: str) -> None:
        """Sets a field, by those of some flags that are given."""
        self.fields[field] = value
        given = [f"--{flag}" for flag in flags if self.has(flag)]
        self.origins[field] = " ".join(given) or "Megatron's default"

    def _read_deepspeed(self, files: Mapping[str, str]) -> dict[str, Any]:
        if not (self.has("deepspeed") and self.has("deepspeed-config")):
            return {}
        path = self.text("deepspeed-config")
        try:
            text = files.get(path) or Path(path).read_text(encoding="utf-8")
            settings = json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read --deepspeed_config {path}: {error}",
                "put the file there: it sets ZeRO, loss scaling and clipping",
            ) from None
        if not isinstance(settings, dict):
            raise ConfigError(f"--deepspeed_config {path} is not an object in JSON")
        used = {"zero_optimization", "fp16", "bf16", "gradient_clipping"}
        batches = {"train_micro_batch_size_per_gpu", "train_batch_size"}
        for key in settings.keys() - used - batches:
            self.notes.append(f"{path}: {key} is not imported")
        return settings

    def _copy_numbers(self, section: str = "") -> None:
        for flag, target in flag_table()["field"].items():
            absent_default = flag in flag_table()["default"] and target not in self.fields
            if target.startswith(section) and (self.has(flag) or absent_default):
                self.set(target, self.number(flag), flag)

    def _set_given(self, section: str) -> None:
        """Sets the fields of a section that follow from the presence or the word of one flag."""
        targets = flag_table()["rule"]
        for flag, value in flag_table()["set"].items():
            if targets[flag].startswith(section) and self.has(flag):
                if isinstance(value, dict):
                    value = value.get(self.text(flag))
                elif isinstance(value, str) and value.startswith("--"):
                    value = self.count(value[2:])
                if value is not None:
                    same = [other for other in targets if targets[other] == targets[flag]]
                    self.set(targets[flag], value, *same)

    def read_model(self) -> dict[str, Any]:
        """Returns the fields of the model alone, of flags that may lack all others."""
        for flag in OF_A_MODEL:
            self.text(flag)
        self._copy_numbers("model.")
        self._model()
        self._experts()
        return {field: value for field, value in self.fields.items() if field.startswith("model.")}

    def _model(self) -> None:
        self._set_given("model.")
        if self.has("qk-layernorm") and self.fields.get("model.norm") != "rms":
            raise ConfigError(
                f"--qk-layernorm with --normalization {self.text('normalization')} has biases",
                "Trainyard's norm of queries and keys has none: --normalization RMSNorm",
            )
        if self.fields.get("model.positions") == "rotary" and self.has("use-rope-scaling"):
            factor = float(self.number("rope-scaling-factor"))
            scaling = ("rope-scaling-factor", "use-rope-scaling")
            self.set("model.rotary_scaling.factor", factor, *scaling)
            if factor != 8:
                self.notes.append(
                    f"rope-scaling-factor {factor:g}: Megatron-LM before August 2026 ignored it "
                    "and computed with 8 (its issue 6305); if that trained the model, "
                    "model.rotary_scaling.factor is 8"
                )
        elif "model.positions" not in self.fields and self.has("no-position-embedding"):
            raise ConfigError("--no-position-embedding", "positions are learned or rotary")
        resets = {"reset-position-ids", "reset-attention-mask"}
        if len(given := resets & self.flags.keys()) == 1:
            (one,), (other,) = given, resets - given
            raise ConfigError(
                f"--{one} without --{other}", "model.attention_within_documents does both"
            )
        if not self.has("ffn-hidden-size"):
            size = 4 * self.count("hidden-size")
            if self.has("swiglu"):
                size = size * 2 // 3 // 64 * 64
            self.set("model.d_ff", size, "hidden-size", "swiglu")
        drops = ("attention-dropout", "hidden-dropout")
        if self.number(drops[0]) != self.number(drops[1]):
            raise ConfigError(
                f"--{drops[0]} {self.text(drops[0])} and --{drops[1]} {self.text(drops[1])} differ",
                "Trainyard has one model.dropout",
            )
        self.set("model.dropout", self.number(drops[0]), *drops)

    def _experts(self) -> None:
        """Those of Megatron-Core; one expert is a dense block of Megatron-DeepSpeed."""
        if self.fields.get("model.n_experts", 1) > 1:
            self._experts_of_core()
        else:
            for key, flags in self.origins.items():
                if "--moe-" in flags or key == "model.n_experts":
                    self.fields.pop(key, None)

    def _experts_of_core(self) -> None:
        """Their losses of balance have our scale: 1 for a uniform load."""
        self.set("model.n_active_experts", self.count("moe-router-topk"), "moe-router-topk")
        self.set("model.n_dense_blocks", self._dense_blocks(), "moe-layer-freq")
        kind, bias = "moe-router-load-balancing-type", "moe-router-enable-expert-bias"
        loss = self.number("moe-aux-loss-coeff") if self.text(kind) != "none" else 0
        if self.has(bias):
            self.set("model.balance", "bias", bias)
            rate = "moe-router-bias-update-rate"
            self.set("model.balance_coefficient", self.number(rate), rate)
        else:
            self.set("model.balance", "loss" if loss else "none", kind, "moe-aux-loss-coeff")
            self.set("model.balance_coefficient", loss, "moe-aux-loss-coeff")
        if loss and self.text(kind) == "aux_loss":
            self.notes.append("aux_loss: of a micro batch; that of model.balance: of a sequence")
        if self.has(GROUPS[1]):
            self.set("model.n_expert_groups", self.count(GROUPS[0]), GROUPS[0])
            self.set("model.n_active_groups", self.count(GROUPS[1]), GROUPS[1])
        is_sigmoid = self.fields.get("model.router") == "sigmoid"
        if is_sigmoid and self.count("moe-router-topk") == 1:
            self.set("model.router_normalized", False, "moe-router-topk")
        self._check_experts(is_sigmoid, has_both=self.has(bias) and loss != 0)

    def _dense_blocks(self) -> int:
        """Counts the first blocks, without experts; all others must have them."""
        text = re.sub(r"[\s'\"]", "", self.text("moe-layer-freq"))
        pattern = re.fullmatch(rf"\(?({_BLOCKS}(?:\+{_BLOCKS})*)\)?", text)
        terms = [term.partition("*") for term in pattern[1].split("+")] if pattern else []
        blocks = "".join(re.sub("[^01]", "", digits) * int(n or 1) for digits, _, n in terms)
        n_dense, n_layers = blocks.count("0"), self.count("num-layers")
        if text != "1" and blocks != "0" * n_dense + "1" * (n_layers - n_dense):
            raise ConfigError(
                f"--moe-layer-freq {text}: only the first blocks can be without experts",
                f"for example ([0]*1+[1]*{n_layers - 1})",
            )
        return n_dense

    def _check_experts(self, is_sigmoid: bool, has_both: bool) -> None:
        """Refuses what experts here do not compute; sets how many are shared."""
        shared, of_tensor = "moe-shared-expert-intermediate-size", "expert-tensor-parallel-size"
        size = "moe-ffn-hidden-size" if self.has("moe-ffn-hidden-size") else "ffn-hidden-size"
        d_expert = self.count(size) if self.has(size) else self.fields["model.d_ff"]
        d_shared = self.count(shared) if self.has(shared) else 0
        self.set("model.n_shared_experts", d_shared // d_expert, shared)
        n_active, tensor = self.count("moe-router-topk"), self.fields.get("parallel.tensor", 1)
        n_groups = self.count(GROUPS[1]) if self.has(GROUPS[1]) else 0
        scores_all = is_sigmoid or self.has("moe-router-pre-softmax")
        sigmoid = "--moe-router-score-function sigmoid"
        problems = {
            (f"--{shared} {d_shared}", f"a multiple of --{size}, {d_expert}"): d_shared % d_expert,
            (
                "--moe-aux-loss-coeff with --moe-router-enable-expert-bias",
                "--moe-aux-loss-coeff 0",
            ): has_both,
            ("--moe-router-enable-expert-bias with softmax", sigmoid): (
                self.has("moe-router-enable-expert-bias") and not is_sigmoid
            ),
            (f"--{GROUPS[1]} with softmax of those chosen", sigmoid): n_groups and not scores_all,
            (
                f"--{GROUPS[1]} {n_groups} with --moe-router-topk {n_active}: two experts rank "
                "a group",
                f"--moe-router-topk {2 * n_groups}",
            ): n_groups and n_active // n_groups != 2,
            (f"--{of_tensor}", f"that of --tensor-model-parallel-size, {tensor}"): (
                self.has(of_tensor) and self.count(of_tensor) != tensor
            ),
            ("--num-experts with --deepspeed, whose experts drop tokens,", "Megatron-Core's"): (
                self.has("deepspeed")
            ),
        }
        for (problem, hint), is_there in problems.items():
            if is_there:
                raise ConfigError(f"{problem} is not supported", f"nearest that works: {hint}")

    def _optimizer(self) -> None:
        """Also Muon, if Megatron's is the same; its defaults depend on the version."""
        betas = ("adam-beta1", "adam-beta2")
        self.set("optimizer.betas", [self.number(beta) for beta in betas], *betas)
        if self.deepspeed:
            clip = float(self.setting("gradient_clipping", None))
            self.set("optimizer.clip_norm", clip, "deepspeed-config")
        if self.flags.get("optimizer") != ["muon"]:
            return
        needed = {"muon-momentum": "0.95", "muon-extra-scale-factor": "0.2"}
        if not self.has("muon-nesterov"):
            needed["muon-use-nesterov"] = ""
        if self.fields["parallel.tensor"] > 1:
            needed["muon-tp-mode"] = "duplicated"
        if absent := [flag for flag in needed if not self.has(flag)]:
            words = " ".join(f"--{flag} {needed[flag]}".strip() for flag in absent)
            raise ConfigError(
                f"--optimizer muon without --{', --'.join(absent)}: Megatron's defaults are not "
                "those of Trainyard's Muon",
                f"add {words}, if the training used them",
            )
        self.set("optimizer.kind", "muon", "optimizer")
        self.set("optimizer.momentum", self.number("muon-momentum"), "muon-momentum")

    def _data(self) -> None:
        for flag, name in (("data-path", "blend"), *((f"{s}-data-path", s) for s in SPLITS)):
            values = [re.sub(r"^\./", "", value) for value in self.flags.get(flag, [])]
            if not values:
                continue
            with suppress(ValueError):  # weights and prefixes, or prefixes alone
                if len(values) % 2 == 0:
                    weights = [float(weight) for weight in values[::2]]
                    values = values[1::2]
                    if len(values) > 1:
                        self.set(f"data.{name}.weights", weights, flag)
            self.set(f"data.{name}.prefixes", values, flag)
        if not self.has("train-data-path"):
            self.set("data.split", self.text("split"), "split")
        if self.has("tokenizer-model"):
            self.set("tokenizer.path", self.text("tokenizer-model"), "tokenizer-model")
        elif self.has("vocab-file"):
            path = PurePath(self.text("vocab-file"))
            known = path.name == "gpt2-vocab.json"
            self.set("tokenizer.path", "gpt2" if known else str(path.parent), "vocab-file")

    def _length(self, stem: str) -> tuple[str, str]:
        """Returns the length that ends first of a flag in several units, and its flag."""
        per = {"tokens": 1, "samples": self.count("seq-length")}
        per["iters"] = per["samples"] * self.count("global-batch-size")
        given = [unit for unit in UNITS if self.has(f"{stem}-{unit}")]
        if not given:
            return "", ""
        unit = min(given, key=lambda u: self.number(f"{stem}-{u}") * per[u])
        for other in set(given) - {unit}:
            self.notes.append(f"--{stem}-{other}: --{stem}-{unit} ends first")
        return f"{self.text(f'{stem}-{unit}')} {UNITS[unit]}", f"{stem}-{unit}"

    def _schedule(self) -> None:
        length, flag = self._length("train")
        if not length:
            raise ConfigError("no length of the training", "add --train-iters or --train-samples")
        self.set("train.length", length, flag)
        decay, decay_flag = self._length("lr-decay")
        decay = decay or length
        self.set("schedule.decay", decay, decay_flag)
        warmup, warmup_flag = self._length("lr-warmup")
        if self.has("lr-warmup-fraction"):
            amount, unit = decay.split()
            fraction = _decimal(self.text("lr-warmup-fraction"), "--lr-warmup-fraction")
            exact = fraction * _decimal(amount, "--lr-decay")
            if exact != int(exact) and unit == "steps":
                exact, unit = exact * self.count("global-batch-size"), "sequences"
            warmup, warmup_flag = f"{int(exact)} {unit}", "lr-warmup-fraction"
        self.set("schedule.warmup", warmup or "0 steps", warmup_flag)
        style, styles = self.text("lr-decay-style"), flag_table()["set"]["lr-decay-style"]
        if style not in styles:
            raise ConfigError(
                f"--lr-decay-style {style} is not supported", f"supported: {', '.join(styles)}"
            )
        self.set("schedule.kind", styles[style], "lr-decay-style")
        if style == "WSD":
            cooldown, flag = self._length("lr-wsd-decay")
            self.set("schedule.cooldown", cooldown or decay, flag)
        if self.has("rampup-batch-size"):
            values = self.flags["rampup-batch-size"]
            if len(values) != 3:
                problem = f"--rampup-batch-size needs three numbers (got {values})"
                raise ConfigError(problem, "its start, increment and samples")
            start, increment, samples = (_count(value, "--rampup-batch-size") for value in values)
            ramp = {"start": start, "increment": increment, "length": f"{samples} sequences"}
            for key, value in ramp.items():
                self.set(f"train.batch_ramp.{key}", value, "rampup-batch-size")

    def _parallel(self) -> None:
        sequence = self.has("sequence-parallel") and self.fields["parallel.tensor"] > 1
        self.set("parallel.sequence", sequence, "sequence-parallel")
        size, no_pipeline = "pipeline-model-parallel-size", "no-pipeline-parallel"
        n_stages = self.count(size)
        self.set("parallel.pipeline", n_stages, size, no_pipeline)
        if n_stages > 1 and self.has(no_pipeline):
            raise ConfigError(
                f"--{no_pipeline} and --{size} {n_stages} contradict each other",
                "remove the one that the training does not use",
            )
        per_chunk = "num-layers-per-virtual-pipeline-stage"
        chunks = "num-virtual-stages-per-pipeline-rank"
        n_chunks = self.count(chunks) if self.has(chunks) else 1
        if self.has(per_chunk):
            n_chunks = self.count("num-layers") // n_stages // self.count(per_chunk)
        if n_chunks > 1:
            self.set("parallel.chunks", n_chunks, per_chunk, chunks)
            self.set("parallel.schedule", "interleaved", per_chunk, chunks)
        is_a2a = "a2a" in self.flags.get("cp-comm-type", [])
        for flag in ("context-parallel-size", "ds-sequence-parallel-size"):
            if self.has(flag) and self.count(flag) > 1:
                ring = flag.startswith("context") and not is_a2a
                self.set("parallel.context", self.count(flag), flag)
                self.set("parallel.context_method", "ring" if ring else "ulysses", "cp-comm-type")

    def _sharding(self) -> None:
        stage, flag = 0, ""
        for other, shards in (("use-distributed-optimizer", 1), ("use-torch-fsdp2", 3)):
            if self.has(other):
                stage, flag = shards, other
        if self.deepspeed:  # DeepSpeed reads its own settings, not --zero-stage
            stage, flag = int(self.setting("zero_optimization.stage", 0)), "deepspeed-config"
        if self.has("msamp") and stage == 0:
            stage, flag = 1, "msamp"  # low-precision gradients know no stage 0
        self.set("parallel.zero_stage", stage, flag)
        self.set("parallel.recompute", "none", "recompute-granularity")
        self._set_given("parallel.recompute")

    def _precision(self) -> None:
        self.set("precision.kind", "fp32")
        self._set_given("precision.kind")
        if self.fields["precision.kind"] != "fp16":
            return
        values: list[Any] = [self.number(flag) for flag in LOSS_SCALE]
        if self.deepspeed:
            values = [2.0 ** min(self.setting("fp16.initial_scale_power", 16), 1000)]
            values += [self.setting("fp16.loss_scale_window", 1000)]
            values += [self.setting("fp16.hysteresis", 2), self.setting("fp16.min_loss_scale", 1)]
        for flag, value in zip(LOSS_SCALE, values, strict=True):
            target = flag_table()["rule"][flag]
            exact = float(value) if target.endswith(("initial", "minimum")) else int(value)
            self.set(target, exact, *(["deepspeed-config"] if self.deepspeed else [flag]))


def _decimal(text: str, place: str) -> Decimal:
    value = Decimal("nan")
    with suppress(InvalidOperation):
        value = Decimal(text)
    if not value.is_finite() or abs(value) > 10**18:
        raise ConfigError(f"{place} needs a number (got {text!r})")
    return value


def _count(text: str, place: str) -> int:
    value = _decimal(text, place)
    if value < 1 or value != int(value):
        raise ConfigError(f"{place} needs a whole number above 0 (got {text!r})")
    return int(value)
