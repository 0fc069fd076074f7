"""Which models the parts time, how, and what they tell each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.gpu.commands import Budget, Variant

Rung = tuple[str, int]
"""What is computed again, and the size of a micro batch."""


@dataclass(frozen=True)
class Size:
    """A model, and where to look for its fastest micro batch."""

    preset: str
    sequences: int
    """In a step: so many that it takes about a second on an H200."""
    ladder: dict[str, tuple[int, ...]]
    aim: float | None
    overrides: tuple[str, ...] = ()


NO_DROPOUT = "model.dropout=0.0"  # as peers and published figures have it
OWN_DROPOUT = "model.dropout=0.1"  # of every GPT-3 preset
SIZES = {
    "1.3B": Size("gpt3-1.3b", 32, {"none": (16, 8, 4), "block": (16,)}, 0.60),
    "350M": Size("gpt3-350m", 64, {"none": (32, 16, 8), "block": (16,)}, 0.50),
    "2.7B": Size("gpt3-2.7b", 16, {"none": (8, 4), "attention": (8,), "block": (16,)}, 0.62),
    "6.7B": Size("gpt3-6.7b", 8, {"none": (2, 1), "attention": (4,), "block": (4,)}, 0.62),
}
TINY = ("train.compile=never",)
SMALL_SIZES = {
    "1.3B": Size("tiny", 8, {"none": (8, 4)}, None, (*TINY, "model.n_layers=4")),
    "6.7B": Size("tiny", 8, {"none": (2,), "attention": (4,)}, None, (*TINY, "model.n_layers=6")),
}


@dataclass
class Session:
    """What parts share.

    Args:
        small: the rehearsal on a CPU, with models of a few hundred thousand parameters.
        budget: of time.
        data: prefixes of token files for the part "accuracy".
        best: of each size, the variant that was fastest, from this run or an earlier one.
    """

    small: bool
    budget: Budget
    data: tuple[str, ...]
    best: dict[str, Rung] = field(default_factory=dict)
    ceiling: float | None = None
    """Measured TFLOP/s of a large product in bf16."""

    @property
    def sizes(self) -> dict[str, Size]:
        return SMALL_SIZES if self.small else SIZES

    @property
    def steps(self) -> tuple[str, ...]:
        return (
            ("--steps", "2", "--warm-up", "1") if self.small else ("--steps", "5", "--warm-up", "2")
        )

    def rung(self, size: str) -> Rung:
        """The fastest that is known, or the first of the ladder."""
        recompute, micros = next(iter(self.sizes[size].ladder.items()))
        return self.best.get(size, (recompute, micros[0]))

    def variant(
        self,
        name: str,
        size: str,
        *overrides: str,
        rung: Rung | None = None,
        kind: str = "bf16",
        options: Iterable[str] = (),
        environment: dict[str, str] | None = None,
    ) -> Variant:
        """Puts a variant of a size together; later overrides win."""
        recompute, micro = rung or self.rung(size)
        chosen = self.sizes[size]
        common = (
            NO_DROPOUT,
            "train.batch_ramp=none",
            f"precision.kind={kind}",
            f"parallel.recompute={recompute}",
            f"train.micro_batch_size={micro}",
            f"train.global_batch_size={max(chosen.sequences, micro)}",
        )
        # An override stands once: the command refuses nothing, but a record should not mislead.
        told = {text.partition("=")[0]: text for text in (*common, *chosen.overrides, *overrides)}
        return Variant(
            name,
            chosen.preset,
            tuple(told.values()),
            (*self.steps, *options),
            environment or {},
        )
