"""From Megatron's flags to fields of a run, by Megatron's own rules."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from trainyard.errors import ConfigError

REQUIRED = ["num-layers", "hidden-size", "num-attention-heads", "seq-length", "lr"]
REQUIRED += ["micro-batch-size", "global-batch-size"]
SPLITS = ("train", "valid", "test")
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8-e4m3": "fp8", "fp8-hybrid": "fp8"}
PRECISIONS |= {"fp8-format": "fp8", "msamp": "fp8_lowbit"}
KINDS = ("field", "rule", "same", "none", "saved", "refused", "refused-flag")
UNITS = {"iters": "steps", "samples": "sequences", "tokens": "tokens"}
RECOMPUTE = {"full": "block", "selective": "attention"}
STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
STYLES["WSD"] = "warmup_stable_decay"
LOSS_SCALE = ("initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale")


@cache
def flag_table() -> dict[str, dict[str, Any]]:
    """Reads the table of flags: kind (field, default, value, same, none, refused) to flags."""
    path = resources.files("trainyard.config") / "megatron_flags.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind, texts in table.pop("names").items():
        more = {name: text for text, names in texts.items() for name in names.split()}
        table[kind] = table.get(kind, {}) | more
    return table


@cache
def classify(flag: str) -> tuple[str, str]:
    """Returns the kind of a flag (one of KINDS, or "") and its field or reason."""
    names = dict.fromkeys((flag, re.sub("^disable-", "no-", flag)))
    entries = [(kind, *entry) for kind in KINDS for entry in flag_table()[kind].items()]
    exact = ((kind, text) for name in names for kind, entry, text in entries if entry == name)
    close = ((k, text) for name in names for k, entry, text in entries if fnmatchcase(name, entry))
    return next(chain(exact, close), ("", ""))


def refusal(argument: str, value: object) -> str:
    """Returns why a checkpoint with this saved argument is refused, or "".

    Of the arguments that change what a model computes: all that are not read have Megatron's
    default. A name that Megatron lacks is one of them, unless it is off.
    """
    flag = argument.replace("_", "-")
    names = (flag, f"no-{flag}", f"disable-{flag}")
    kind, reason = next(filter(any, map(classify, names)), ("", "unknown to Megatron"))
    if kind not in ("", "refused") or is_default(flag, value):
        return ""
    return reason


def rope_factor_notes(factor: float) -> list[str]:
    """Returns a note if older versions of Megatron computed with another factor."""
    note = (
        f"rope-scaling-factor {factor:g}: Megatron-LM before August 2026 ignored it and computed "
        "with 8 (its issue 6305); if that trained the model, model.rotary_scaling.factor is 8"
    )
    return [] if factor == 8 else [note]


def is_default(flag: str, value: object) -> bool:
    """Whether a value is the one of Megatron where the flag is absent."""
    default = flag_table()["default"].get(flag)
    if value is None or value is False or value == []:
        return default is None or value is None
    with suppress(TypeError, ValueError):
        return float(value) == float(default)  # type: ignore[arg-type]
    return str(value) == default


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
        self._copy_numbers()
        self._switches()
        self._model()
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
        found: Any = self.deepspeed
        for key in place.split("."):
            found = found.get(key) if isinstance(found, dict) else found and "no table"
        if default is None and found in (None, 0):
            return float("inf")
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or abs(found) > 2**31:
            raise ConfigError(
                f"--deepspeed_config: {place} needs a number (got {found!r})",
                "write the number that the training used",
            )
        return found

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

    def _copy_numbers(self) -> None:
        for flag in REQUIRED:
            self.text(flag)
        for flag, target in flag_table()["field"].items():
            absent_default = flag in flag_table()["default"] and target not in self.fields
            if self.has(flag) or absent_default:
                self.set(target, self.number(flag), flag)

    def _switches(self) -> None:
        self.set("log.tensorboard", self.has("tensorboard-dir"), "tensorboard-dir")
        if self.has("wandb-project"):
            self.set("log.wandb_project", self.text("wandb-project"), "wandb-project")
        if self.has("deterministic-mode"):
            self.set("train.deterministic", True, "deterministic-mode")
        if self.has("untie-embeddings-and-output-weights"):
            self.set("model.tied_embeddings", False, "untie-embeddings-and-output-weights")

    def _model(self) -> None:
        self._architecture()
        self._documents()
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
        betas = ("adam-beta1", "adam-beta2")
        self.set("optimizer.betas", [self.number(beta) for beta in betas], *betas)
        if self.deepspeed:
            clip = float(self.setting("gradient_clipping", None))
            self.set("optimizer.clip_norm", clip, "deepspeed-config")

    def _architecture(self) -> None:
        if self.has("swiglu"):
            self.set("model.mlp", "swiglu", "swiglu")
        if self.has("disable-bias-linear"):
            self.set("model.bias", False, "disable-bias-linear")
        if self.has("group-query-attention"):
            groups = ("group-query-attention", "num-query-groups")
            self.set("model.n_key_value_heads", self.count("num-query-groups"), *groups)
        is_rms = self.text("normalization").lower() == "rmsnorm"
        if is_rms:
            self.set("model.norm", "rms", "normalization")
        if self.has("qk-layernorm"):
            if not is_rms:
                raise ConfigError(
                    f"--qk-layernorm with --normalization {self.text('normalization')} has biases",
                    "Trainyard's norm of queries and keys has none: --normalization RMSNorm",
                )
            self.set("model.query_key_norm", "head", "qk-layernorm")
        rotary = ("position-embedding-type", "use-rotary-position-embeddings")
        if self.text(rotary[0]) in ("rope", "rotary") or self.has(rotary[1]):
            self.set("model.positions", "rotary", *rotary)
            if self.has("use-rope-scaling"):
                scaling = ("rope-scaling-factor", "use-rope-scaling")
                self.set("model.rotary_scaling.factor", float(self.number(scaling[0])), *scaling)
                self.notes += rope_factor_notes(self.number(scaling[0]))
        elif self.has("no-position-embedding"):
            raise ConfigError("--no-position-embedding", "positions are learned or rotary")

    def _documents(self) -> None:
        resets = ("reset-position-ids", "reset-attention-mask")
        given = [flag for flag in resets if self.has(flag)]
        if len(given) == 1:
            (other,) = {*resets} - {*given}
            raise ConfigError(
                f"--{given[0]} without --{other}", "model.attention_within_documents does both"
            )
        if given:
            self.set("model.attention_within_documents", True, *resets)

    def _optimizer(self) -> None:
        """Muon, if Megatron's is the same; its defaults depend on the version."""
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
        style = self.text("lr-decay-style")
        if style not in STYLES:
            raise ConfigError(
                f"--lr-decay-style {style} is not supported", f"supported: {', '.join(STYLES)}"
            )
        self.set("schedule.kind", STYLES[style], "lr-decay-style")
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
        pipeline = ("pipeline-model-parallel-size", "no-pipeline-parallel")
        n_stages = self.count(pipeline[0])
        self.set("parallel.pipeline", n_stages, *pipeline)
        if n_stages > 1 and self.has(pipeline[1]):
            raise ConfigError(
                f"--{pipeline[1]} and --{pipeline[0]} {n_stages} contradict each other",
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
        if self.has("use-distributed-optimizer"):
            stage, flag = 1, "use-distributed-optimizer"
        if self.has("use-torch-fsdp2"):
            stage, flag = 3, "use-torch-fsdp2"
        if self.deepspeed:  # DeepSpeed reads its own settings, not --zero-stage
            stage, flag = int(self.setting("zero_optimization.stage", 0)), "deepspeed-config"
        if self.has("msamp") and stage == 0:
            stage, flag = 1, "msamp"  # low-precision gradients know no stage 0
        self.set("parallel.zero_stage", stage, flag)
        recompute = "none"
        if self.has("checkpoint-activations"):
            recompute = "block"
        if self.has("recompute-activations"):
            recompute = "attention"
        if self.has("recompute-granularity"):
            recompute = RECOMPUTE.get(self.text("recompute-granularity"), "none")
        flags = ("checkpoint-activations", "recompute-activations", "recompute-granularity")
        self.set("parallel.recompute", recompute, *flags)

    def _precision(self) -> None:
        kind = "fp32"
        for flag, value in PRECISIONS.items():
            if self.has(flag):
                kind = value
        self.set("precision.kind", kind, *PRECISIONS)
        if kind != "fp16":
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
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value) > 10**18:
        raise ConfigError(f"{place} needs a number (got {text!r})")
    return value


def _count(text: str, place: str) -> int:
    value = _decimal(text, place)
    if value < 1 or value != int(value):
        raise ConfigError(f"{place} needs a whole number above 0 (got {text!r})")
    return int(value)
