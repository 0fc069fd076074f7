"""Every option of a run: the fields of `run.toml`, with type, range and meaning.

The docstring of each field is its documentation: `trainyard show --fields` prints it.
Derived values (data-parallel size, padded vocabulary, steps) are in `layout.resolve`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainyard import units
from trainyard.config.precisions import OptimizerKind, Precision, Stored, stored
from trainyard.config.section import (
    Interval,
    Length,
    ListOf,
    Name,
    NoneByName,
    Points,
    QueryKeyNorm,
    Rate,
    RotaryScaling,
    Section,
    Shares,
)

Recompute = Literal["none", "attention", "block"]
FlopFormula = Literal["megatron_causal", "megatron", "megatron_deepspeed", "deepspeed_2024"]
MOST_PREFIXES = 32_766  # a corpus is a 16-bit number in the order
CUDNN_TOKENS = 128
"""cuDNN's attention takes multiples of it: of others, some gave NaN (pytorch/pytorch#196678)."""


def _default_d_head(model: dict[str, int]) -> int:
    return max(1, model.get("d_model", 1) // model.get("n_heads", 1))  # both absent if invalid


class Model(Section):
    """Decoder in the names of the GPT-3 paper (arXiv:2005.14165, table 2.1); by default GPT-3's."""

    n_layers: int = Field(default=12, ge=1, le=10_000)
    """Transformer blocks."""
    d_model: int = Field(default=768, ge=1)
    """Hidden size: features in the residual stream."""
    n_heads: int = Field(default=12, ge=1)
    """Attention heads."""
    d_head: int = Field(default_factory=_default_d_head, ge=1)
    """Features of each head; absent: d_model / n_heads."""
    n_key_value_heads: int = Field(default_factory=lambda model: model.get("n_heads", 1), ge=1)
    """Heads of keys and values, shared by equal groups of heads (GQA); absent: n_heads."""
    query_key_norm: QueryKeyNorm = "none"
    """Normalize queries and keys, without bias: of each `head` (arXiv:2302.05442), or `all` of a
    token together, by RMSNorm (arXiv:2501.00656). Also true for `head`, and false for `none`."""
    d_ff: int = Field(default=3072, ge=1)
    """Features inside the MLP; 4 x d_model in GPT-3."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """GELU, in its tanh approximation; or SwiGLU, with a second input matrix (arXiv:2002.05202)."""
    n_experts: int = Field(default=0, ge=0)
    """MLPs in a block, a few of them active for each token; none is dropped. 0: one MLP for all."""
    n_active_experts: int = Field(default=2, ge=1)
    """Experts that each token uses: those with the highest scores; of equal ones, the first."""
    d_expert: int = Field(default_factory=lambda model: model.get("d_ff", 1), ge=1)
    """Features inside each expert; absent: d_ff."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token uses besides, as one MLP (arXiv:2401.06066)."""
    n_dense_blocks: int = Field(default=0, ge=0)
    """First blocks that have one MLP, of d_ff, instead of experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: softmax over all, or the sigmoid of each (arXiv:2412.19437)."""
    router_normalized: bool = True
    """Divide the scores of a token's experts by their sum."""
    router_scale: float = Field(default=1.0, gt=0)
    """Multiplies the output of experts, except shared ones."""
    n_expert_groups: int = Field(default=1, ge=1)
    """Equal groups of experts, ranked by the sum of their two highest scores."""
    n_active_groups: int = Field(default=1, ge=1)
    """Groups of which each token may use experts."""
    balance: Literal["none", "loss", "bias"] = "loss"
    """What keeps the load of experts equal: a loss for each sequence, that of a uniform load 1
    (arXiv:2412.19437, section 2.1.2); or a bias of scores that only decides which experts are used,
    changed after each step by the load of its batch (arXiv:2408.15664)."""
    balance_coefficient: float = Field(
        default_factory=lambda model: 1e-3 if model.get("balance") == "bias" else 1e-2, ge=0
    )
    """Coefficient of that loss, or change of a bias in a step; absent: 0.01 or 0.001."""
    router_z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the router's z-loss, the mean squared log of the sum of its exponentials
    (arXiv:2202.08906)."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, or RMSNorm (arXiv:1910.07467) without bias."""
    norm_place: Literal["before", "after"] = "before"
    """Normalize the input of attention and of the MLP, or their output (arXiv:2501.00656)."""
    bias: bool = True
    """Biases of linear layers."""
    positions: Literal["learned", "rotary"] = "learned"
    """Learned, added to the embedding; or rotary, turning queries and keys (arXiv:2104.09864)."""
    rotary_base: float = Field(default=10_000.0, gt=1)
    """Base of the rotary frequencies."""
    rotary_scaling: Annotated[RotaryScaling | None, NoneByName] = None
    """Llama 3's scaling of positions, for longer sequences than in earlier training; or "none"."""
    sequence_length: int = Field(default=2048, ge=1)
    """Tokens per sequence, and learned positions of the model."""
    vocabulary_size: int = Field(default=50257, ge=2)
    """Token ids of the tokenizer; the embedding is padded beyond this."""
    vocabulary_multiple: int = Field(default=128, ge=1)
    """Pad the embedding to a multiple of this x parallel.tensor rows, for fast matmuls."""
    tied_embeddings: bool = True
    """Share one matrix between the token embedding and the output head."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of embeddings, attention weights and residual outputs in training."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; residual outputs get init_std / sqrt(2 n_layers)."""
    parametrization: Literal["standard", "complete_p"] = "standard"
    """How initial weights, learning rates and outputs depend on width and depth: not at all, or so
    that the best learning rate of a small model is that of a large one (arXiv:2505.01618)."""
    base_d_model: int = Field(default=256, ge=1)
    """Width for which `complete_p` changes nothing: that of the small model."""
    base_n_layers: int = Field(default=2, ge=1)
    """Depth for which `complete_p` changes nothing."""
    base_d_expert: Annotated[int | None, NoneByName] = Field(default=None, ge=1)
    """Features of an expert for which it changes nothing; absent: they grow with d_model."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in each LayerNorm, to the mean square in each RMSNorm."""
    attention_within_documents: bool = False
    """Let tokens see their own document only, with positions from its start."""
    end_of_document_id: Annotated[int | None, NoneByName] = Field(default=None, ge=0)
    """Last token of a document; absent: that of the tokenizer or of the token files."""

    def shards_heads(self, tensor: int) -> bool:
        """Returns whether tensor ranks have equal heads; above those of keys, they share keys."""
        queries, shared = self.n_heads, self.n_key_value_heads
        n_features = (queries + 2 * shared) * self.d_head
        shares = not (tensor % shared or queries % tensor or n_features % tensor)
        return shared % tensor == 0 or (shares and self.query_key_norm != "all")

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if not self.n_experts:
            return self
        n, groups, active = self.n_experts, self.n_expert_groups, self.n_active_groups
        problems = {
            f"n_experts={n} must be divisible by n_expert_groups={groups}; nearest "
            f"n_expert_groups that divides: {units.nearest_divisor(n, groups)}": n % groups,
            f"n_active_groups={active} is more than n_expert_groups={groups}; nearest that works: "
            f"{groups}": active > groups,
            f"n_active_experts={self.n_active_experts} is more than the {n // groups * active} "
            f"experts that a token may use; nearest that works: {n // groups * active}": (
                self.n_active_experts > n // groups * active
            ),
            f"n_dense_blocks={self.n_dense_blocks} leaves none of n_layers={self.n_layers} blocks "
            f"with experts; nearest that works: {self.n_layers - 1}": (
                self.n_dense_blocks >= self.n_layers
            ),
            "bias=true is not for experts, whose matmuls have none; nearest that works: "
            "bias=false": self.bias,
        }
        if problem := next((text for text, is_there in problems.items() if is_there), ""):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, shared, scaling = self.n_heads, self.n_key_value_heads, self.rotary_scaling
        if "d_head" not in self.model_fields_set and self.d_model % heads:
            raise ValueError(
                f"d_model={self.d_model} must be divisible by n_heads={heads}; "
                f"nearest n_heads that divides: {units.nearest_divisor(self.d_model, heads)}"
            )
        if heads % shared:
            raise ValueError(
                f"n_heads={heads} must be divisible by n_key_value_heads={shared}; "
                f"nearest n_key_value_heads that divides: {units.nearest_divisor(heads, shared)}"
            )
        if self.positions == "rotary" and self.d_head % 2:
            raise ValueError(
                f"d_head={self.d_head} must be even when positions='rotary'; "
                f"nearest d_head that is: {self.d_head + 1}"
            )
        if self.positions != "rotary" and scaling:
            raise ValueError("rotary_scaling needs positions='rotary' (got 'learned')")
        if (self.end_of_document_id or 0) >= self.vocabulary_size:
            raise ValueError(
                f"end_of_document_id={self.end_of_document_id} is not below "
                f"vocabulary_size={self.vocabulary_size}"
            )
        return self


class Blend(Section):
    """Token files to sample from, and their weights."""

    prefixes: ListOf[str] = ()
    """Paths of token files without `.bin`/`.idx`, or patterns: `data/web_*_text_document[:-2]`."""
    weights: ListOf[float] = ()
    """Relative weight of each entry; the files of a pattern share its weight by size. Empty: all by
    size."""
    patterns: ListOf[str] = ()
    """In a run folder: the patterns that `prefixes` were found with. Leave it empty."""

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.weights and len(self.weights) != len(self.prefixes):
            raise ValueError(f"{len(self.prefixes)} prefixes but {len(self.weights)} weights")
        if any(not weight > 0 for weight in self.weights):
            raise ValueError(f"weights must be positive (got {list(self.weights)})")
        if len(self.prefixes) > MOST_PREFIXES:
            raise ValueError(f"{len(self.prefixes)} prefixes; a blend takes {MOST_PREFIXES}")
        paths = Counter(map(os.path.normpath, self.prefixes))
        repeated = [path for path, count in paths.items() if count > 1]
        if repeated:
            raise ValueError(f"{repeated[0]!r} is listed more than once in prefixes")
        return self


class Data(Section):
    """Training data: one blend divided into splits, or one blend per split."""

    blend: Blend = Blend()
    """Token files that `split` divides into train, valid and test."""
    split: Shares = "949,50,1"
    """Shares of train, valid and test in each file of `blend`: by documents, as in Megatron-LM; by
    tokens if it has fewer than 100 documents, or too few to give every share one."""
    train: Blend = Blend()
    """Token files for training only; replaces `blend`."""
    valid: Blend = Blend()
    """Token files for evaluation during training; needs `train`."""
    test: Blend = Blend()
    """Token files for one evaluation at the end of training; needs `train`."""
    from_step: int = Field(default=0, ge=0)
    """Step of the run at which this data begins; to change the data of a run, its newest step."""
    skip: Length = units.Length(0, "sequences")
    """Sequences to skip at the start of the training data, such as "300 steps"; to continue where
    another run stopped, the length that it has read."""
    cache_folder: str = "runs/cache"
    """Cache of the sequence order, so that a restart does not rebuild it."""

    @model_validator(mode="after")
    def _one_way_to_split(self) -> Self:
        alone = [name for name in ("train", "valid", "test") if getattr(self, name).prefixes]
        if self.blend.prefixes and alone:
            raise ValueError(f"give either blend with split, or {', '.join(alone)}; not both")
        if alone and "train" not in alone:
            raise ValueError(f"{alone[0]} is given without train")
        return self


class TokenizerChoice(Section):
    """The tokenizer that made the data; needed to print text and to count bytes."""

    path: str = ""
    """`gpt2` (included), or a folder with tokenizer.json or with vocab.json and merges.txt, also
    named gpt2-vocab.json and gpt2-merges.txt; empty: token ids only."""


class BatchRamp(Section):
    """Batch size ramp-up, as Megatron's rampup-batch-size."""

    start: int = Field(ge=1)
    """Sequences per step at the start."""
    increment: int = Field(ge=1)
    """Sequences added at each of the equal stages up to global_batch_size."""
    length: Length
    """Amount of data over which the batch grows."""


class Train(Section):
    """Length and batch sizes."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences per forward pass of one data-parallel rank."""
    global_batch_size: int = Field(default=256, ge=1)
    """Sequences per optimizer step, over all data-parallel ranks and accumulation steps."""
    batch_ramp: Annotated[BatchRamp | None, NoneByName] = None
    """Batch size ramp-up; absent or "none": global_batch_size throughout."""
    length: Length = units.Length(300 * 10**9, "tokens")
    """Total training length; a run that has begun can be extended."""
    start_from: str = ""
    """Weights to start from: a run or its folder, `base@300` for its step 300, a checkpoint folder,
    or a Hugging Face folder; empty: random. Read before the first step only."""
    start_with: Literal["weights", "weights_and_optimizer"] = "weights"
    """What to take from there: weights alone, or also the optimizer's moments and update count."""
    stop_after_minutes: float = Field(default=float("inf"), gt=0, allow_inf_nan=True)
    """Save and exit after this much wall-clock time; the run can be resumed."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of initial weights, dropout and data order."""
    compile: Literal["gpu", "always", "never"] = "gpu"
    """Where to torch.compile the blocks; on a CPU it rarely repays its start-up time."""
    deterministic: bool = False
    """Use deterministic kernels only: slower on a GPU, but a resumed run is bitwise the same."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss, the mean squared log of the softmax's denominator
    (arXiv:2204.02311); reported losses remain the cross entropy."""


class Optimizer(Section):
    """AdamW (arXiv:1711.05101) or Muon (arXiv:2502.16982), and gradient clipping."""

    kind: OptimizerKind = "adamw"
    """`muon` updates matrices of blocks by orthogonalized momentum, and the rest as AdamW."""
    momentum: Rate = 0.95
    """Decay rate of Muon's momentum."""
    learning_rate: float = Field(default=6e-4, gt=0)
    """Peak learning rate, reached after warmup."""
    betas: Annotated[tuple[Rate, Rate], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of weight matrices and embeddings; biases and norms have none."""
    clip_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Maximum global gradient norm; inf: no clipping."""


class Schedule(Section):
    """Learning-rate schedule, counted in consumed sequences."""

    kind: Literal["cosine", "linear", "constant", "warmup_stable_decay", "points"] = "cosine"
    """Shape after warmup; `warmup_stable_decay` stays at the peak, then falls over `cooldown`;
    `points` is the whole schedule, by `points` alone."""
    minimum_learning_rate: float = Field(default=6e-5, ge=0)
    """Final learning rate."""
    warmup: Length = units.Length(375 * 10**6, "tokens")
    """Length of the linear warmup from zero to the peak."""
    decay: Length = units.Length(260 * 10**9, "tokens")
    """Length from the start of the run to the minimum learning rate (Megatron's lr-decay)."""
    cooldown: Length = units.Length(26 * 10**9, "tokens")
    """Length of the final decay of `warmup_stable_decay`, which ends where `decay` ends."""
    points: Points = units.RatePoints()
    """Learning rates at positions, in order: "0: 0, 2000 steps: 6e-4, 1B tokens: 6e-5". Linear
    between two, constant after the last; two at one position make a jump."""


class Parallel(Section):
    """How the model is sharded over ranks; the remaining ranks are data parallel."""

    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks: they shard heads, MLP features and vocabulary rows."""
    sequence: bool = False
    """Sequence parallelism: shard activations by sequence between the tensor-parallel regions."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline-parallel ranks: each has consecutive blocks of each chunk."""
    chunks: int = Field(default=1, ge=1)
    """Model chunks on each pipeline rank (interleaving)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes in a pipeline; interleaved needs more than one chunk."""
    context: int = Field(default=1, ge=1)
    """Context-parallel ranks: they shard each sequence."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    """Attention over a sharded sequence; the ring has no dropout."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of a block, among the data- and context-parallel ranks of a
    replica: each has equally many, and tokens go to them and back."""
    zero_stage: int = Field(default=1, ge=0, le=3)
    """What data-parallel ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters. 1 is
    the fastest; 2 and 3 reduce gradients in every micro batch."""
    reduce_format: Literal["fp32", "bf16"] = "fp32"
    """Format in which ranks send and sum gradients with ZeRO 1 to 3; those of micro batches add up
    in fp32. `bf16` halves the bytes, and rounds once for each rank."""
    data_replicate: int = Field(default=1, ge=1)
    """Groups that each hold a full sharded copy (HSDP's replicate dimension)."""
    recompute: Recompute = "none"
    """Activations that the backward pass recomputes instead of storing."""
    recompute_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the blocks of each pipeline stage that do so, evenly spread, and one at least."""

    @property
    def shards_state(self) -> bool:
        """Whether data-parallel ranks shard the optimizer state (ZeRO 1 and above)."""
        return self.zero_stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether data-parallel ranks shard the gradients (ZeRO 2 and above)."""
        return self.zero_stage >= 2

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks shard the weights, and gather them for each use (ZeRO 3)."""
        return self.zero_stage == 3


class Checkpoint(Section):
    """When to save checkpoints, and which to keep."""

    interval: Interval = units.Duration(30 * 60)
    """Time or steps between checkpoints, such as "30 minutes" or "500 steps"; a plain number counts
    steps. 0: only at the end."""
    keep_last: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep; older ones are removed once a new one is complete."""
    keep_every: int = Field(default=0, ge=0)
    """Save at steps that are a multiple of this, too, and keep these checkpoints for good; 0:
    none."""
    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the lowest held-out loss to keep as well; above 0, saves at each
    evaluation, too."""
    background: bool = True
    """Write asynchronously; training waits only for the copy to host memory."""

    def interval_seconds(self, step_seconds: float, n_steps: int) -> float:
        """Returns the time between checkpoints of a run of `n_steps`."""
        every, whole = self.interval, step_seconds * n_steps
        seconds = step_seconds * every if isinstance(every, int) else every.seconds
        return min(seconds or whole, whole)


class Evaluate(Section):
    """Held-out loss and text samples during training."""

    interval: int = Field(default=1000, ge=0)
    """Steps between evaluations; 0: only at the end."""
    batches: int = Field(default=10, ge=0)
    """Global batches per evaluation, and of the test split at the end; 0: no evaluation."""
    sample_interval: int = Field(default=0, ge=0)
    """Steps between text samples; 0: no samples."""
    sample_prompts: ListOf[str] = ("The",)
    """Prompts of the samples."""
    sample_tokens: int = Field(default=64, ge=1)
    """Tokens per sample."""


class Log(Section):
    """Logging during training."""

    interval: int = Field(default=10, ge=1)
    """Steps between log lines; metrics.jsonl gets one object for each."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb_project: str = ""
    """Weights & Biases project; empty: none. A resumed run continues its run there."""
    flop_formula: FlopFormula = "megatron_causal"
    """Also show TFLOP/s by this formula, and their share of the peak; MFU is by megatron_causal."""


class Guard(Section):
    """How training handles machine and numerical errors."""

    skipped_steps_limit: int = Field(default=10, ge=1)
    """Stop after this many consecutive steps skipped for gradients that are not finite; fp16 steps
    that lower the loss scale do not count."""
    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    """On a jump of loss or gradient norm: log it; skip the update; or roll back to the previous
    checkpoint and skip the data since."""
    spike_window: int = Field(default=128, ge=8)
    """Number of past steps to compare a loss or gradient norm with."""
    spike_deviations: float = Field(default=6.0, gt=0)
    """Standard deviations above their mean that make a spike."""
    compare_interval: int = Field(default=1000, ge=0)
    """Steps between comparisons of weights that several ranks replicate; 0: no comparisons."""
    step_timeout_minutes: float = Field(default=20.0, gt=0)
    """A rank that spends longer in one phase of a step is hung: it is named, and all ranks end."""
    slow_timeout_minutes: float = Field(default=60.0, gt=0)
    """The same limit for start-up, the first step, evaluation, loading and saving."""


class Kernels(Section):
    """GPU kernels, where several give the same result; by default the fastest expected."""

    attention: Literal["auto", "flash", "cudnn"] = "auto"
    """Attention without dropout and documents: cuDNN's on GPUs of compute capability 9 and 10, else
    flash attention."""
    swiglu_halves: bool = True
    """Compute gates and values of SwiGLU in two contiguous halves, for wider memory reads."""
    reduced_precision: bool = False
    """Let matmuls add partial sums in bf16 or fp16 instead of fp32."""


class Run(Section):
    """A complete run; the same file reproduces it."""

    name: Name = "run"
    """Name of the run; its folder is runs/<name>."""
    description: str = ""
    """What this run or preset is, the sources of its values, and what is special."""
    model: Model = Model()
    """Model shape."""
    data: Data = Data()
    """Training and held-out data."""
    tokenizer: TokenizerChoice = TokenizerChoice()
    """Tokenizer of the data."""
    train: Train = Train()
    """Batches and length."""
    optimizer: Optimizer = Optimizer()
    """AdamW or Muon, and clipping."""
    schedule: Schedule = Schedule()
    """Learning-rate schedule."""
    parallel: Parallel = Parallel()
    """Layout over ranks."""
    precision: Precision = Precision()
    """Number formats."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    evaluate: Evaluate = Evaluate()
    """Held-out loss and samples."""
    log: Log = Log()
    """Log lines, metrics, TensorBoard."""
    kernels: Kernels = Kernels()
    """Kernels of a GPU."""
    guard: Guard = Guard()
    """Machine and numerical errors."""

    def stored(self, in_block: bool, n_dimensions: int) -> Stored:
        """Returns the formats between steps of a parameter in a block, or outside."""
        return stored(self.precision.kind, self.optimizer.kind, in_block, n_dimensions)
