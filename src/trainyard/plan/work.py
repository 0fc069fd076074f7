"""What an optimizer step has to do on each rank, counted and not yet priced: `plan/time.py` does.

For one micro batch of n tokens, a block of width D and MLP width F, shared by t tensor ranks, has

    products    n x D x 3D/t, n x D/t x D, n x D x F/t, n x F/t x D; twice that in the backward pass
    attention   2 n T D/t FLOP if it looks at what a causal model needs, 2.5 times that backward
    bytes       norms, dropout and sums read and write the residual stream, n x D values, a number
                of times; GELU and the heads' order what is inside the layers, n x (F + 3D)/t

How often values are read and written, how many kernels do it, and whether attention keeps its
scores to itself depends on the program that trains. `OURS` describes this one; peers whose speed
was measured are described where they are compared (benchmarks/planning_tables.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainyard.config.run import Run
from trainyard.plan.resolve import Plan
from trainyard.plan.size import Shape, block_shapes, rest_shapes
from trainyard.plan.traffic import Traffic, block_gathers, count_fp8_blocks, rank_traffic

Kind = tuple[int, int, bool, bool]
"""How many blocks a stage has, how many multiply in fp8, and whether it is the first and the last.
"""
BACKWARD = 2
"""Products, bytes and kernels of a backward pass, in those of a forward pass."""
ATTENTION_BACKWARD = 2.5
"""Products of fused attention there: five for two, since it makes the scores again."""


@dataclass(frozen=True)
class Program:
    """What a program does for the same mathematics; in a forward pass, unless it says otherwise."""

    name: str
    stream_bytes: float
    """Moved by each block for each value of the residual stream."""
    inner_bytes: float
    """Moved by each block for each value between its layers: queries, keys, values, MLP."""
    score_bytes: float
    """Moved for each attention score; 0 where attention is fused."""
    logit_bytes: float
    """Moved for each logit, forward and backward together."""
    gradient_bytes: float
    """Moved for each parameter and micro batch to add a gradient to the sum."""
    block_kernels: int
    """Started by each block."""
    reduced_bytes: int
    """Of a gradient that data ranks add up."""
    cast_bytes: float
    """Moved for each operand of an fp8 product to bring it into the format."""
    shown_data: float
    """Share of what data ranks exchange that takes time although they compute meanwhile: 1 where
    they do not, else what the exchange takes from computing."""
    hides_in_pipeline: bool
    """Whether data ranks below ZeRO 3 compute meanwhile in a pipeline too."""
    hides_tensor: bool
    """Whether tensor ranks exchange parts while they multiply others."""
    attention_share: float = 1.0
    """Speed of its fused attention beside that of ours."""


# Compiled: dropout, residual sum and norm are one kernel (reads two values, writes two, at 2 bytes,
# for each half of a block), GELU is another, heads are views. Logits: written, read for maximum and
# sum, read and written for the gradient, which both products read. fp8: an operand is read to find
# its scale, read again and written, 5 bytes; 4 such conversions serve the 6 operands of a layer's
# three products. Exchanges take up to 24 of 108 to 132 multiprocessors: an estimate.
OURS = Program(
    name="trainyard",
    stream_bytes=16,
    inner_bytes=4,
    score_bytes=0,
    logit_bytes=12,
    gradient_bytes=10,
    block_kernels=20,
    reduced_bytes=4,
    cast_bytes=3.3,
    shown_data=0.2,
    hides_in_pipeline=False,
    hides_tensor=False,
)
# Every operation of a block is a kernel of its own; estimates.
UNCOMPILED = replace(OURS, stream_bytes=24, inner_bytes=6, logit_bytes=24, block_kernels=40)


@dataclass(frozen=True)
class Product:
    """Equal matrix products: `rows x inner` times `inner x columns`."""

    rows: int
    inner: int
    columns: int
    count: float = 1
    in_fp8: bool = False


@dataclass(frozen=True)
class Pass:
    """One pass of a micro batch through a stage."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0
    """Of fused attention."""
    memory_bytes: float = 0
    """Read and written by all else."""
    kernels: float = 0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.products + other.products,
            self.attention_flops + other.attention_flops,
            self.memory_bytes + other.memory_bytes,
            self.kernels + other.kernels,
        )

    def times(self, n: float, attention: float | None = None) -> Pass:
        """Repeats it; attention as often as the rest, unless told."""
        return Pass(
            tuple(replace(each, count=each.count * n) for each in self.products),
            self.attention_flops * (n if attention is None else attention),
            self.memory_bytes * n,
            self.kernels * n,
        )


@dataclass(frozen=True)
class Stage:
    """What one micro batch costs at one stage of the pipeline."""

    forward: Pass
    backward: Pass
    n_blocks: int
    n_parameters: int
    """On one of the ranks that share it."""


@dataclass(frozen=True)
class Work:
    """What a step has to do."""

    run: Run
    program: Program
    stages: tuple[Stage, ...]
    """Stage s is on pipeline rank s % the number of ranks."""
    traffic: tuple[tuple[Traffic, ...], ...]
    """Of a whole step, by pipeline rank."""
    updated: tuple[int, ...]
    """Parameters that a rank's optimizer has, by pipeline rank."""
    unpacked: tuple[int, ...]
    """Weights that arrive as fp8 in a step and are made 16 bits again, by pipeline rank."""
    n_micro_batches: int


def count_work(run: Run, plan: Plan, program: Program | None = None) -> Work:
    """Counts the work of a step of train.global_batch_size.

    Args:
        run: what is trained.
        plan: its consequences.
        program: what trains it; absent: this one, compiled unless train.compile is "never".
    """
    if program is None:
        program = UNCOMPILED if run.train.compile == "never" else OURS
    counter = _Counter(run, plan, program)
    topology = plan.topology
    kinds = [
        (end - first, count_fp8_blocks(run, (first, end)), first == 0, end == run.model.n_layers)
        for first, end in plan.stages
    ]
    # Most stages are alike, and so are most ranks.
    examples = dict(zip(kinds, plan.stages, strict=True))
    stages = {kind: counter.stage(blocks) for kind, blocks in examples.items()}
    traffic: dict[tuple[Kind, ...], tuple[Traffic, ...]] = {}
    ranks = [tuple(kinds[rank :: topology.pipeline]) for rank in range(topology.pipeline)]
    for rank, of_rank in enumerate(ranks):
        if of_rank not in traffic:
            traffic[of_rank] = tuple(rank_traffic(run, plan, rank))
    n_shards = topology.shard * topology.context if run.parallel.zero_stage else 1
    return Work(
        run=run,
        program=program,
        stages=tuple(stages[kind] for kind in kinds),
        traffic=tuple(traffic[of_rank] for of_rank in ranks),
        updated=tuple(
            sum(stages[kind].n_parameters for kind in of_rank) // n_shards for of_rank in ranks
        ),
        unpacked=tuple(
            counter.unpacked_values(sum(kind[1] for kind in of_rank), block_gathers(run, topology))
            for of_rank in ranks
        ),
        n_micro_batches=run.train.global_batch_size // topology.data // run.train.micro_batch_size,
    )


class _Counter:
    """Counts what stages do for one micro batch."""

    def __init__(self, run: Run, plan: Plan, program: Program) -> None:
        self.run, self.model, self.program = run, run.model, program
        self.tensor = plan.topology.tensor
        self.block = block_shapes(run.model, self.tensor)
        self.padded_vocabulary_size = plan.padded_vocabulary_size
        self.n_tokens = (
            run.train.micro_batch_size * run.model.sequence_length // plan.topology.context
        )
        self.wide = 2 if run.precision.kind == "fp32" else 1  # bytes of values, in those of 16 bits

    def stage(self, blocks: tuple[int, int]) -> Stage:
        """Counts a stage, with embedding and head where it has them.

        Args:
            blocks: its first and the one after its last.
        """
        n_blocks, n_fp8 = blocks[1] - blocks[0], count_fp8_blocks(self.run, blocks)
        forward, backward = self._blocks(n_blocks - n_fp8, in_fp8=False)
        if n_fp8:
            forward_fp8, backward_fp8 = self._blocks(n_fp8, in_fp8=True)
            forward, backward = forward + forward_fp8, backward + backward_fp8
        head = self._head() if blocks[1] == self.model.n_layers else Pass()
        n_parameters = self._parameters(blocks)
        summing = Pass(memory_bytes=n_parameters * self.program.gradient_bytes)
        return Stage(
            forward=forward + head,
            backward=backward + head.times(BACKWARD) + summing,
            n_blocks=n_blocks,
            n_parameters=n_parameters,
        )

    def _blocks(self, n: int, *, in_fp8: bool) -> tuple[Pass, Pass]:
        """Counts the forward and the backward pass of a number of blocks that are alike."""
        attention, rest = self._attention(in_fp8), self._rest_of_block(in_fp8)
        block = attention + rest
        again = {"none": Pass(), "attention": attention, "block": block}
        backward = block.times(BACKWARD, ATTENTION_BACKWARD) + again[self.run.parallel.recompute]
        return block.times(n), backward.times(n)

    def _parameters(self, blocks: tuple[int, int]) -> int:
        """Counts them on one rank."""
        rest = rest_shapes(self.model, self.padded_vocabulary_size, blocks, self.tensor)
        return (blocks[1] - blocks[0]) * _count(self.block) + _count(rest)

    def unpacked_values(self, n_fp8_blocks: int, gathers: int) -> int:
        """Counts weights that arrive as fp8 in a step and are made 16 bits again."""
        matrices = {name: shape for name, shape in self.block.items() if len(shape) > 1}
        return gathers * n_fp8_blocks * _count(matrices) * self.run.precision.fp8.all_gather

    def _attention(self, in_fp8: bool) -> Pass:
        """The half of a block that looks at other tokens."""
        model, n, D = self.model, self.n_tokens, self.model.d_model
        T, part = model.sequence_length, model.d_model // self.tensor
        products = [
            Product(n, D, 3 * part, in_fp8=in_fp8),
            Product(n, part, D, in_fp8=in_fp8),
        ]
        memory_bytes = self._stream_bytes() / 2 + self.program.inner_bytes * n * 3 * part
        flops = 2.0 * n * T * part
        if self.program.score_bytes:
            # All of the square, head by head: scores, then values.
            n_heads = n / T * model.n_heads / self.tensor
            head = D // model.n_heads
            products.append(Product(T, head, T, count=2 * n_heads))
            memory_bytes += self.program.score_bytes * n_heads * T * T
            flops = 0
        return Pass(
            tuple(products), flops, memory_bytes * self.wide, self.program.block_kernels / 2
        )

    def _rest_of_block(self, in_fp8: bool) -> Pass:
        """The MLP with its norm and sum."""
        n, D, part = self.n_tokens, self.model.d_model, self.model.d_ff // self.tensor
        products = (Product(n, D, part, in_fp8=in_fp8), Product(n, part, D, in_fp8=in_fp8))
        memory_bytes = self._stream_bytes() / 2 + self.program.inner_bytes * n * part
        return Pass(products, 0, memory_bytes * self.wide, self.program.block_kernels / 2)

    def _stream_bytes(self) -> float:
        shares = self.tensor if self.run.parallel.sequence else 1
        return self.program.stream_bytes * self.n_tokens * self.model.d_model / shares

    def _head(self) -> Pass:
        """The output matrix and the loss."""
        n, rows = self.n_tokens, self.padded_vocabulary_size // self.tensor
        product = Product(n, self.model.d_model, rows)
        logit_bytes = self.program.logit_bytes / (1 + BACKWARD)
        return Pass((product,), 0, logit_bytes * n * rows * self.wide, self.program.block_kernels)


def _count(shapes: dict[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))
