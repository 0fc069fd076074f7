"""Every option of a run: what one `run.toml` may say, with its type, range and meaning.

The text under each field is its manual: `trainyard show --fields` prints it.
Derived values (data-parallel size, padded vocabulary, steps) are not here; `plan.resolve` computes
them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from trainyard import units
from trainyard.config import rules

Length = Annotated[units.Length, BeforeValidator(units.parse_length), PlainSerializer(str)]
Prefixes = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
NoneByName = BeforeValidator(lambda value: None if value == "none" else value)
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def _as_text(value: object) -> object:
    """Gives the text of a number: one share alone reads as one on the command line."""
    return str(value) if isinstance(value, int | float) else value


def _checked_split(text: str) -> str:
    units.parse_shares(text)
    return text


class Section(BaseModel):
    """A table of the run file: typed, immutable, and closed to unknown fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
    )


class Model(Section):
    """Shape of the decoder, in the names of the GPT-3 paper (arXiv:2005.14165, table 2.1)."""

    n_layers: int = Field(default=12, ge=1, le=10_000)
    """Transformer blocks."""
    d_model: int = Field(default=768, ge=1)
    """Features in the residual stream."""
    n_heads: int = Field(default=12, ge=1)
    """Attention heads; each has d_model / n_heads features."""
    d_ff: int = Field(default=3072, ge=1)
    """Features inside the MLP; 4 x d_model in GPT-3."""
    sequence_length: int = Field(default=2048, ge=1)
    """Tokens a sequence has, and positions the model knows."""
    vocabulary_size: int = Field(default=50257, ge=2)
    """Token ids the tokenizer can give; the embedding is padded above this."""
    vocabulary_multiple: int = Field(default=128, ge=1)
    """The embedding has a multiple of this x parallel.tensor rows, for fast matrix products."""
    tied_embeddings: bool = True
    """One matrix serves as token embedding and as output head."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Probability of dropping embeddings, attention weights and residual outputs in training."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; residual outputs get init_std / sqrt(2 n_layers)."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance inside each LayerNorm."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.d_model % self.n_heads:
            working = rules.nearest(rules.divisors(self.d_model), self.n_heads)
            raise ValueError(
                f"d_model={self.d_model} must be divisible by n_heads={self.n_heads}; "
                f"nearest n_heads that divides: {working[0]}"
            )
        return self


class Blend(Section):
    """Token files to draw from, and in which proportion."""

    prefixes: Prefixes = ()
    """Paths of token files without `.bin`/`.idx`; relative ones start at the working folder."""
    weights: Numbers = ()
    """Share of each prefix, any positive scale; empty draws in proportion to their sizes."""

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.weights and len(self.weights) != len(self.prefixes):
            raise ValueError(f"{len(self.prefixes)} prefixes but {len(self.weights)} weights")
        if any(not weight > 0 for weight in self.weights):
            raise ValueError(f"weights must be positive (got {list(self.weights)})")
        repeated = sorted({p for p in self.prefixes if self.prefixes.count(p) > 1})
        if repeated:
            raise ValueError(f"{repeated[0]!r} stands in prefixes more than once")
        return self


class Data(Section):
    """What the model reads: one blend cut into splits, or one blend for each split."""

    blend: Blend = Blend()
    """Token files that `split` cuts into train, valid and test."""
    split: Annotated[str, BeforeValidator(_as_text), AfterValidator(_checked_split)] = "949,50,1"
    """Shares of train, valid and test in each file of `blend`: by documents, as in Megatron-LM; by
    tokens if it has fewer than 100 documents, or too few for each share to get one."""
    train: Blend = Blend()
    """Token files for training alone; used instead of `blend`."""
    valid: Blend = Blend()
    """Token files for evaluation during training; goes with `train`."""
    test: Blend = Blend()
    """Token files for the final evaluation; goes with `train`."""
    cache_folder: str = "runs/cache"
    """Where the order of sequences is kept, so that a restart need not rebuild it."""

    @model_validator(mode="after")
    def _one_way_to_split(self) -> Self:
        alone = [name for name in ("train", "valid", "test") if getattr(self, name).prefixes]
        if self.blend.prefixes and alone:
            raise ValueError(f"give either blend with split, or {', '.join(alone)}; not both")
        if alone and "train" not in alone:
            raise ValueError(f"{alone[0]} is given without train")
        return self


class Tokenizer(Section):
    """Which tokenizer made the data; needed to print text and to count bytes."""

    path: str = ""
    """`gpt2` (included), or a folder with tokenizer.json or with vocab.json and merges.txt;
    empty: token ids only."""


class BatchRamp(Section):
    """Starts with small batches and grows them, as Megatron's rampup-batch-size does."""

    start: int = Field(ge=1)
    """Sequences a step at the beginning."""
    increment: int = Field(ge=1)
    """Sequences added at each of the equal stages on the way to global_batch_size."""
    length: Length
    """Over how much data the batch grows."""


class Train(Section):
    """How long and in which batches."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences in one forward pass of one replica."""
    global_batch_size: int = Field(default=256, ge=1)
    """Sequences in one optimizer step, over all replicas and accumulation steps."""
    batch_ramp: Annotated[BatchRamp | None, NoneByName] = None
    """Growing batches at the start; absent or "none": global_batch_size throughout."""
    length: Length = units.Length(300 * 10**9, "tokens")
    """When the run is done."""
    stop_after_minutes: float = Field(default=float("inf"), gt=0, allow_inf_nan=True)
    """Saves and leaves after this much wall-clock time; a resumed run goes on."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seeds initial weights, dropout and the order of the data."""
    compile: Literal["gpu", "always", "never"] = "gpu"
    """Where torch.compile builds the blocks; on a CPU it rarely pays for its start-up time."""


class Optimizer(Section):
    """AdamW with decoupled weight decay (arXiv:1711.05101) and gradient clipping."""

    learning_rate: float = Field(default=6e-4, gt=0)
    """Peak learning rate, after warmup."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Pull towards zero on weight matrices and embeddings; never on biases and norms."""
    clip_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Largest global gradient norm; inf turns clipping off."""

    @model_validator(mode="after")
    def _betas_are_rates(self) -> Self:
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1 (got {list(self.betas)})")
        return self


class Schedule(Section):
    """The learning rate over the run, counted in consumed sequences."""

    kind: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    """Shape after warmup; `warmup_stable_decay` stays at the peak, then falls over `cooldown`."""
    minimum_learning_rate: float = Field(default=6e-5, ge=0)
    """Where the learning rate ends."""
    warmup: Length = units.Length(375 * 10**6, "tokens")
    """Linear rise from zero to the peak, at the start."""
    decay: Length = units.Length(260 * 10**9, "tokens")
    """From the start of the run to where the minimum is reached (Megatron's lr-decay)."""
    cooldown: Length = units.Length(26 * 10**9, "tokens")
    """The final fall of `warmup_stable_decay`, which ends where `decay` ends."""


class Parallel(Section):
    """How one model replica is cut over ranks; data parallelism takes the ranks that are left."""

    tensor: int = Field(default=1, ge=1)
    """Ranks that share each block: heads, MLP features and rows of the vocabulary."""
    sequence: bool = False
    """Cut activations along the sequence between the tensor-parallel regions."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that share the stack of blocks."""
    chunks: int = Field(default=1, ge=1)
    """Model chunks on each pipeline rank (interleaving)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes in a pipeline; interleaved needs more than one chunk."""
    context: int = Field(default=1, ge=1)
    """Ranks that share each sequence."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    """How attention sees the whole sequence when it is shared; the ring has no dropout."""
    zero_stage: int = Field(
        default_factory=lambda parallel: rules.default_zero_stage(parallel.get("pipeline", 1)),
        ge=0,
        le=3,
    )
    """What data-parallel ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters; with a
    pipeline, gradients are whole until the end of a step. Absent: 2, or 1 with a pipeline."""
    data_replicate: int = Field(default=1, ge=1)
    """Groups that each hold a full sharded copy (hybrid sharding)."""
    recompute: Literal["none", "attention", "block"] = "none"
    """What the backward pass computes again instead of storing."""

    @property
    def gathers_again(self) -> bool:
        """Says whether the backward pass gathers tokens again (`sequence`) instead of keeping them.

        A block that is recomputed keeps none, and a split backward pass would gather them twice.
        """
        return self.sequence and self.recompute != "block" and self.schedule != "zero_bubble"


class LossScale(Section):
    """Dynamic loss scaling, for fp16 alone."""

    initial: float = Field(default=2.0**32, ge=1)
    """Scale of the first step."""
    window: int = Field(default=1000, ge=1)
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflows until the scale halves; from then on each halves it, until it has doubled again."""
    minimum: float = Field(default=1.0, gt=0)
    """The scale never falls below this."""


class Fp8(Section):
    """Matrix products in fp8, for fp8 and fp8_lowbit alone."""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """What shares a scale, a power of two: a whole tensor, or each row, which takes longer."""
    all_gather: bool = False
    """Under ZeRO 1 to 3 the weights of blocks travel as fp8, half the bytes; tensorwise alone."""
    precise_blocks: int = Field(default=1, ge=0)
    """Blocks at each end kept in bf16, as the head always is."""
    emulate: bool = False
    """On a device without products in fp8: compute what they would give, slowly."""


class Precision(Section):
    """Number formats of the matrix products; weights and optimizer state follow from them."""

    kind: Literal["fp32", "fp16", "bf16", "fp8", "fp8_lowbit"] = "bf16"
    """bf16 computes in bfloat16 with fp32 master weights, gradients and optimizer state; fp8 does
    the same but for the large products of the blocks."""
    loss_scale: LossScale = LossScale()
    """Loss scaling of fp16."""
    fp8: Fp8 = Fp8()
    """Products of fp8 and fp8_lowbit."""

    @property
    def multiplies_in_fp8(self) -> bool:
        """Says whether blocks multiply in fp8."""
        return self.kind in ("fp8", "fp8_lowbit")


class Checkpoint(Section):
    """When the state is saved and what is kept."""

    interval: int = Field(default=1000, ge=0)
    """Steps between checkpoints; 0 saves at the end alone."""
    keep_last: int = Field(default=3, ge=1)
    """Newest checkpoints that stay; older ones are removed after a new one is complete."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of steps that are a multiple of this stay for good; 0: of none."""
    keep_best: int = Field(default=0, ge=0)
    """So many of those with the lowest held-out loss stay too; it is known where the evaluation was
    at the step of the checkpoint."""
    background: bool = True
    """Write while training goes on, which waits for the copy to host memory alone."""


class Evaluate(Section):
    """Loss on held-out data, and text samples, during training."""

    interval: int = Field(default=1000, ge=0)
    """Steps between evaluations; 0 evaluates at the end alone."""
    batches: int = Field(default=10, ge=0)
    """Global batches in one evaluation; 0 turns evaluation off."""
    sample_interval: int = Field(default=0, ge=0)
    """Steps between text samples; 0 prints none."""
    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ("The",)
    """What each sample continues."""
    sample_tokens: int = Field(default=64, ge=1)
    """Length of each sample."""


class Log(Section):
    """What is written while training."""

    interval: int = Field(default=10, ge=1)
    """Steps between log lines; metrics.jsonl has one object for each."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb_project: str = ""
    """Weights & Biases project to log to; empty: none."""


class Guard(Section):
    """What training does about errors of machines and numbers."""

    skipped_steps_limit: int = Field(default=10, ge=1)
    """Stops after this many steps in a row whose gradients were not finite and were skipped; those
    of fp16 that lower the loss scale do not count."""
    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    """When loss or gradient norm jump: say so; leave out the update; or go back to the checkpoint
    before and skip the data since."""
    spike_window: int = Field(default=128, ge=8)
    """Steps that a loss or gradient norm is compared with."""
    spike_deviations: float = Field(default=6.0, gt=0)
    """Standard deviations above their mean at which it is a spike."""
    compare_interval: int = Field(default=1000, ge=0)
    """Steps between comparisons of the weights that several ranks have a copy of; 0: none."""
    step_timeout_minutes: float = Field(default=20.0, gt=0)
    """A rank that is longer in one part of a step hangs: it is named, and all ranks are ended."""
    slow_timeout_minutes: float = Field(default=60.0, gt=0)
    """The same while starting, in the first step, evaluating, loading and saving."""


class Run(Section):
    """Everything one run needs; the same file reproduces it."""

    name: Name = "run"
    """Names the run folder, runs/<name>."""
    description: str = ""
    """What this run or preset is, where its values come from, what is odd about it."""
    model: Model = Model()
    """Shape of the model."""
    data: Data = Data()
    """What it reads."""
    tokenizer: Tokenizer = Tokenizer()
    """What made the data."""
    train: Train = Train()
    """Batches and length."""
    optimizer: Optimizer = Optimizer()
    """AdamW and clipping."""
    schedule: Schedule = Schedule()
    """Learning rate over the run."""
    parallel: Parallel = Parallel()
    """How it is cut over ranks."""
    precision: Precision = Precision()
    """Number formats."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""
    evaluate: Evaluate = Evaluate()
    """Held-out loss and samples."""
    log: Log = Log()
    """Lines, metrics, TensorBoard."""
    guard: Guard = Guard()
    """Errors of machines and numbers."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = rules.disagreements(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
