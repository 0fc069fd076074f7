"""One rank's part of a model, and the passes of a step through it.

    GPT, this rank's stages  ->  shard tokens  ->  shard layers  ->  FSDP  ->  initial weights
         parallel/pipeline       context           tensor            data      model/init

Layers have no memory until they are sharded, so that no rank ever holds the whole model.

Step, loop and optimizer see parameters with gradients and one loss; each module below handles one
axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.architecture import UNSCALED, Multipliers, ParameterSpec, parameters_of
from trainyard.config.devices import is_amd_with_avx512
from trainyard.config.precisions import Stored
from trainyard.config.rules import takes_cudnn
from trainyard.config.run import Run
from trainyard.errors import MachineError
from trainyard.layout.ranks import recomputed_blocks
from trainyard.layout.resolve import Plan
from trainyard.model.attention import CUDNN, FLASH, attention_kernel, cudnn_can_attend
from trainyard.model.compiled import compile_blocks
from trainyard.model.experts import Router
from trainyard.model.gpt import GPT, MLP, initialize
from trainyard.model.linear import add_to_gradients, cast_once, defer_sums
from trainyard.model.positions import find_document_ends, pack_lengths
from trainyard.parallel.context import apply_context_parallel, refuse_ring, take_shard
from trainyard.parallel.experts import apply_expert_parallel
from trainyard.parallel.mesh import Mesh, device_name
from trainyard.parallel.placement import (
    Placement,
    Shard,
    is_distributed,
    is_first_holder,
    local_part,
    place,
)
from trainyard.parallel.tensor import apply_tensor_parallel
from trainyard.precision.block_scaled import BlockScaledTensor, torch_dtype
from trainyard.precision.policy import PrecisionPolicy, use_onednn

if TYPE_CHECKING:
    from trainyard.parallel.pipeline import Pipeline

EMBEDDING = "embedding.weight"
WITHOUT_MEMORY = "meta"
"""The device of layers that are not sharded yet."""


class MissingGradientError(Exception):
    """The backward passes left a parameter without a gradient.

    Of layers that share casts, those that `add_to_gradients` makes before the passes are zeros
    instead: of embeddings, and of all in pipelines and in several micro batches of tensor ranks.
    """


@dataclass(eq=False)
class LocalParameter:
    """A parameter of this rank, and how it is sharded or replicated."""

    name: str
    """Its name in the whole model."""
    parameter: nn.Parameter
    dimension: int | None
    """The dimension along which tensor ranks shard it."""
    is_copy: bool
    """Whether it is the second copy of a tied embedding, on the last pipeline stage."""
    stored: Stored
    """Formats between steps."""
    is_partial: bool = False
    """Whether each tensor rank has a part of the gradient."""
    multipliers: Multipliers = UNSCALED
    """What multiplies its learning rate, weight decay and epsilon."""
    shards: tuple[Shard, ...] = ()
    """This rank's part among tensor ranks and those that share experts."""
    converted_gradient: Tensor | BlockScaledTensor | None = None
    """The complete gradient, until used, if it is kept in another format than the weight."""

    def norm_weight(self, n_tensor_ranks: int) -> float:
        """One over the number of ranks that hold this part; 0 for a copy."""
        n_holders = n_tensor_ranks if self.dimension is None else 1
        if is_distributed(self.parameter):
            mesh = self.parameter.device_mesh
            for placement, size in zip(self.parameter.placements, mesh.shape, strict=True):
                n_holders *= size if placement.is_replicate() else 1
        return 0.0 if self.is_copy else 1 / n_holders

    @property
    def placement(self) -> Placement:
        """Which part of the whole parameter this rank holds."""
        return place(self.parameter, self.shards)

    @property
    def gradient(self) -> Tensor | BlockScaledTensor:
        """This rank's part of the gradient.

        Raises:
            MissingGradientError: there is none.
        """
        if self.converted_gradient is not None:
            return self.converted_gradient
        gradient = self.parameter.grad
        if gradient is None:
            raise MissingGradientError(f"{self.name} has no gradient")
        return local_part(gradient)

    def convert_gradient(self) -> None:
        """Replaces the complete gradient by one in the format to keep.

        That of a vector is copied, as it is a view that would keep those of a whole block alive.
        """
        gradient, dtype = self.gradient, torch_dtype(self.stored.gradient)
        assert isinstance(gradient, Tensor) and self.converted_gradient is None, (
            f"{self.name} is already converted"
        )
        is_scaled = self.stored.gradient.is_scaled
        self.converted_gradient = (
            BlockScaledTensor.of(gradient, dtype) if is_scaled else gradient.to(dtype)
        )
        self.parameter.grad = None


def compiles_blocks(run: Run, device: torch.device) -> bool:
    """Tells whether a run compiles its blocks on a device."""
    return run.train.compile == "always" or (run.train.compile == "gpu" and device.type == "cuda")


class ParallelModel:
    """This rank's part of the model.

    Args:
        run: the run.
        plan: of the run, on these ranks.
        mesh: the groups of this rank.
        compute_dtype: like that of `PrecisionPolicy`.
        is_filled: whether a checkpoint will fill it: its weights are then zero, not drawn.

    Attributes:
        is_filled: as given.
        stages: its parts of the model, by pipeline stage.
        local_parameters: its parameters, stage by stage.
        attention_kernel: its name, "cpu" on a CPU.
        norm_weights: weight of each parameter's squared norm in the global one, fp64.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        mesh: Mesh,
        compute_dtype: torch.dtype | None = None,
        *,
        is_filled: bool = False,
    ) -> None:
        self.mesh, self.is_filled = mesh, is_filled
        self._parallel = run.parallel
        self._is_tied = run.model.tied_embeddings
        self._precision = PrecisionPolicy(run, compute_dtype)
        self._micro_batch_size = run.train.micro_batch_size
        self.attention_kernel = choose_attention(run, self._precision.compute_dtype, mesh.device)
        numbers = range(mesh.coordinates.pipeline, len(plan.stages), mesh.topology.pipeline)
        self.stages = {number: self._build_stage(run, plan, number) for number in numbers}
        for model in self.stages.values():
            if not is_filled:
                initialize(model, run.train.seed, self._store)
        # Now, because FSDP swaps parameters between a forward and a backward pass.
        self.local_parameters = self._list_tensors(GPT.named_parameters)
        self._untrained = self._list_tensors(GPT.named_buffers)
        self.routers: dict[int, Router] = {
            int(name.split(".")[1]): module
            for model in self.stages.values()
            for name, module in model.named_modules()
            if isinstance(module, Router)
        }
        self._scale = torch.ones((), device=mesh.device)
        for router in self.routers.values():
            router.scale = self._scale
        shares = [each.norm_weight(mesh.topology.tensor) for each in self.local_parameters]
        self.norm_weights = torch.tensor(shares, dtype=torch.float64, device=mesh.device)
        # FSDP already holds one cast of each weight.
        sharing = self.stages.values() if mesh.data is None else ()
        self._layers = [layer for model in sharing for layer in model.layers_with_shared_casts()]
        self._pipeline: Pipeline | None = None
        if mesh.pipeline is not None:
            # Imported here: with it comes torch's compiler, which takes half a second.
            from trainyard.parallel.pipeline import Pipeline

            any_stage = next(iter(self.stages.values()))
            shape = (self._micro_batch_size, len(any_stage.position_table.tokens))
            example = torch.empty(shape, dtype=torch.int64, device=mesh.device)
            self._pipeline = Pipeline(
                self.stages,
                len(plan.stages),
                mesh.pipeline,
                run.parallel,
                example,
                self._layers,
            )

    def _build_stage(self, run: Run, plan: Plan, number: int) -> GPT:
        mesh, parallel, blocks = self.mesh, run.parallel, plan.stages[number]
        padded = plan.padded_vocabulary_size
        with torch.device(WITHOUT_MEMORY if mesh.topology.n_ranks > 1 else mesh.device):
            model = GPT(
                run.model, padded, self._precision.compute_dtype, parallel.recompute, blocks
            )
            self._choose_kernels(model, run, recomputed_blocks(parallel, blocks))
            if mesh.context is not None:
                refuse_ring(run, mesh.device)
                apply_context_parallel(model, mesh.context, parallel.context_method)
            if mesh.tensor is not None:
                apply_tensor_parallel(model, mesh.tensor, parallel, self._micro_batch_size)
            if run.model.n_experts:
                apply_expert_parallel(model, mesh)
        if model.cross_entropy is not None:
            model.cross_entropy.z_loss = run.train.z_loss
        self._precision.convert_matmuls(model)
        self._precision.convert_weights(model)
        if compiles_blocks(run, mesh.device):
            splits = mesh.pipeline is not None and parallel.schedule == "zero_bubble"
            defers = splits or mesh.tensor is not None
            in_order = mesh.tensor is not None or mesh.context is not None
            compile_blocks(model, in_order=in_order, defers=defers)
        if mesh.data is not None:
            # Imported here: with it comes DTensor, which takes half a second.
            from trainyard.parallel.data import apply_fsdp, convert_messages

            apply_fsdp(model, mesh.data, parallel.zero_stage, mesh.same_experts)
            convert_messages(model, self._precision)
        allocate(model, mesh.device)
        if mesh.device.type == "cpu" and is_amd_with_avx512():
            use_onednn(model)
        return model.train()

    def _list_tensors(
        self, named: Callable[[GPT], Iterable[tuple[str, Any]]]
    ) -> list[LocalParameter]:
        """Lists parameters, or buffers, that are in checkpoints."""
        return [
            LocalParameter(
                name,
                tensor,
                specs[name].dimension if self.mesh.tensor is not None else None,
                is_copy=number > 0 and name == EMBEDDING,
                stored=self._precision.stored(name, tensor.ndim),
                is_partial=specs[name].is_partial,
                multipliers=specs[name].multipliers,
                shards=self._shards_of(specs[name]),
            )
            for number, model in self.stages.items()
            for specs in [parameters_of(model.layers)]
            for name, tensor in named(model)
            if name in specs
        ]

    def _shards_of(self, spec: ParameterSpec) -> tuple[Shard, ...]:
        topology, rank = self.mesh.topology, self.mesh.rank
        shards = []
        if spec.dimension is not None:
            tensor_rank = topology.coordinates(rank).tensor
            shards += [Shard(spec.dimension, tensor_rank, topology.tensor)]
        if spec.of_experts:
            shards += [Shard(0, topology.expert_rank(rank), topology.expert)]
        return tuple(shards)

    @property
    def saved_tensors(self) -> list[LocalParameter]:
        """Everything in checkpoints besides the optimizer's state: also balances of routers."""
        return [*self.local_parameters, *self._untrained]

    def is_writer(self, local: LocalParameter) -> bool:
        """Whether this rank is the first of those that hold the same part of a tensor."""
        is_first = local.dimension is not None or self.mesh.coordinates.tensor == 0
        if not is_distributed(local.parameter):  # FSDP has no buffers
            data_rank = self.mesh.data_rank_and_size[0]
            is_first &= data_rank == self.mesh.coordinates.context == 0
        return is_first and not local.is_copy and is_first_holder(local.parameter)

    def _store(self, parameter: nn.Parameter, spec: ParameterSpec, value: Tensor) -> None:
        """Stores this rank's part of the value of a whole parameter."""
        part = place(parameter, self._shards_of(spec)).of(value)
        local_part(parameter).copy_(part)

    def _choose_kernels(self, model: GPT, run: Run, recomputed: set[int]) -> None:
        for number, block in model.blocks.items():
            attention: Any = block.attention
            if int(number) not in recomputed:
                whole: Any = block
                whole.recompute = attention.recompute = "none"
            attention.core.takes_cudnn = self.attention_kernel == CUDNN
            if self.mesh.device.type == "cuda" and not run.kernels.swiglu_halves:
                for mlp in (m for m in block.modules() if isinstance(m, MLP)):
                    mlp.up.n_parts = 1

    @property
    def whole_model(self) -> GPT | None:
        """The model, if this rank computes all of it; its weights may be sharded (ZeRO)."""
        topology = self.mesh.topology
        alone = topology.pipeline == topology.context == topology.tensor == 1
        return self.stages[0] if alone else None

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, dropout_seeds: Tensor | None, scale: float | Tensor
    ) -> Tensor:
        """Computes the gradients of the batch from this rank's sequences, reduced over ranks.

        Args:
            tokens: ids of this rank's sequences, (sequences, T).
            labels: the next ids.
            dropout_seeds: of the sequences; None without dropout.
            scale: multiplies the loss; a scalar tensor on the mesh's device, or a number.

        Returns:
            this rank's part of the scaled loss of the whole batch; sum it over all ranks.
        """
        n_micro_batches = len(tokens) // self._micro_batch_size
        self._scale.fill_(scale)
        for router in self.routers.values():
            router.load.zero_()
        inputs = self._inputs(tokens, packs_lengths=self.attention_kernel == FLASH)
        if dropout_seeds is not None:
            inputs["dropout_seeds"] = dropout_seeds.to(self.mesh.device, non_blocking=True)
        tokens, labels = self._take(tokens), self._take(labels)
        if self._pipeline is not None:
            loss = self._pipeline.forward_backward(tokens, labels, inputs, n_micro_batches, scale)
        else:
            loss = self._accumulate(tokens, labels, inputs, scale)
        for each in self.local_parameters:
            if each.stored.converts_gradient and each.converted_gradient is None:
                each.convert_gradient()
        self._add_up_gradients()
        self._add_up_load()
        if loss is None:
            return torch.zeros((), device=self.mesh.device)
        return loss / self.mesh.topology.tensor  # each tensor rank has the whole of it

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for each in self.local_parameters:
            each.parameter.grad = each.converted_gradient = None

    def _inputs(self, tokens: Tensor, *, packs_lengths: bool = False) -> dict[str, Tensor]:
        """Returns what every stage takes besides tokens, with a row for each sequence."""
        end_id = next(iter(self.stages.values())).end_id
        if end_id is None:
            return {}
        ends = find_document_ends(tokens, end_id)
        inputs = {"document_ends": ends.to(self.mesh.device, non_blocking=True)}
        if packs_lengths:
            lengths, longest = pack_lengths(ends, self._micro_batch_size)
            on_device = lengths.to(self.mesh.device, non_blocking=True)
            inputs["document_lengths"] = on_device[:, None].expand(-1, longest, -1)
        return inputs

    def _take(self, ids: Tensor) -> Tensor:
        """Takes this rank's tokens of its sequences, (sequences, T) to (sequences, T/cp)."""
        group = self.mesh.context
        if group is not None:
            method = self._parallel.context_method
            ids = take_shard(ids, group.rank(), group.size(), method, dimension=1)
        return ids.to(self.mesh.device, non_blocking=True)

    def _prepare_micro_batch(self, model: GPT, *, is_last: bool) -> None:
        if self.mesh.data is not None:
            from trainyard.parallel.data import prepare_micro_batch

            prepare_micro_batch(model, self._parallel.zero_stage, is_last=is_last)

    def _accumulate(
        self, tokens: Tensor, labels: Tensor, inputs: dict[str, Tensor], scale: float | Tensor
    ) -> Tensor:
        (model,) = self.stages.values()
        total = torch.zeros((), device=self.mesh.device)
        size = self._micro_batch_size
        beside_exchange = self.mesh.tensor is not None and len(tokens) > size
        with cast_once(self._layers, model.compute_dtype):
            for start in range(0, len(tokens), size):
                here = slice(start, start + size)
                is_last = start + size >= len(tokens)
                if start == 0 or is_last:  # nothing changes between
                    self._prepare_micro_batch(model, is_last=is_last)
                add_to_gradients(self._layers, is_ahead=beside_exchange)
                hidden = model(tokens[here], **{name: each[here] for name, each in inputs.items()})
                loss = model.summed_loss(hidden, labels[here], scale)
                deferring = defer_sums(for_exchange=True) if beside_exchange else nullcontext()
                with deferring, _convert_complete(self.local_parameters if is_last else ()):
                    loss.backward()  # type: ignore[no-untyped-call]
                total = total + loss.detach()
        return total

    def held_out_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Computes the summed loss of a batch, (G, T), without dropout; the same on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for loss in self._evaluate(GPT.summed_loss, tokens, labels):
            total += loss
        return self._sum_over_ranks(total)

    def score_sequences(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Scores the labels of each sequence, (G, 2), as `GPT.score_sequences`, on every rank.

        Without pipeline, context and sequence parallelism, T may be below sequence_length.
        """
        dp_rank, dp_size = self.mesh.data_rank_and_size
        scores = torch.zeros(len(tokens), 2, dtype=torch.float64, device=self.mesh.device)
        if found := self._evaluate(GPT.score_sequences, tokens, labels):
            scores.chunk(dp_size)[dp_rank].copy_(torch.cat(found))
        return self._sum_over_ranks(scores)

    @torch.no_grad()
    def _evaluate(
        self, measure: Callable[..., Tensor], tokens: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """Measures this rank's micro batches without dropout; empty if another stage does."""
        dp_rank, dp_size = self.mesh.data_rank_and_size
        tokens, labels = (ids.chunk(dp_size)[dp_rank] for ids in (tokens, labels))
        inputs = self._inputs(tokens)
        tokens, labels = self._take(tokens), self._take(labels)
        for model in self.stages.values():
            model.eval()
        size = self._micro_batch_size
        if self._pipeline is not None:
            found = self._pipeline.evaluate(measure, tokens, labels, inputs, len(tokens) // size)
        else:
            (model,) = self.stages.values()
            size *= max(1, len(model.position_table.tokens) // tokens.shape[1])  # as many tokens
            found = []
            for start in range(0, len(tokens), size):
                here = slice(start, start + size)
                hidden = model(tokens[here], **{name: each[here] for name, each in inputs.items()})
                found.append(measure(model, hidden, labels[here]))
        for model in self.stages.values():
            model.train()
        return found

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        """Sums what the ranks measured of their tokens; each tensor rank has the whole of it."""
        if self.mesh.topology.n_ranks > 1:
            total /= self.mesh.topology.tensor
            dist.all_reduce(total)
        return total

    def _add_up_gradients(self) -> None:
        """Sums a parameter's gradients over tensor ranks, or over both pipeline ends."""
        # Replicated layers saw only this rank's tokens (`sequence`), norms of heads only its heads.
        partial_gradients = [
            each
            for each in self.local_parameters
            if each.dimension is None and (self._parallel.sequence or each.is_partial)
        ]
        if self.mesh.tensor is not None and partial_gradients:
            gradients = _tensors(partial_gradients)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.mesh.tensor)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        if self.mesh.first_and_last_stage is not None and self._is_tied:
            for gradient in _tensors(
                each for each in self.local_parameters if each.name == EMBEDDING
            ):
                dist.all_reduce(gradient, group=self.mesh.first_and_last_stage)

    def _add_up_load(self) -> None:
        """Sums the tokens of each expert over the ranks with other tokens, in place."""
        if self.mesh.data is None or not self.routers:
            return
        load = torch.stack([router.load for router in self.routers.values()])
        for axis in range(self.mesh.data.ndim):
            dist.all_reduce(load, group=self.mesh.data.get_group(axis))
        for router, whole in zip(self.routers.values(), load, strict=True):
            router.load.copy_(whole)

    @torch.no_grad()
    def balance_experts(self, skip: Tensor) -> None:
        """Changes the balances of routers by the load of the step.

        Args:
            skip: 1 to keep them, else 0; on the device.
        """
        for router in self.routers.values():
            if router.balance is not None:
                above = (router.load - router.load.mean()).sign()
                change = (1 - skip) * router.model.balance_coefficient
                router.balance.sub_(above * change)


@torch.no_grad()
def allocate(model: GPT, device: torch.device) -> None:
    """Gives a model memory on a device, where it has none, and makes its parameters zero."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    tensors: Iterable[Tensor] = itertools.chain(model.parameters(), model.buffers())
    for tensor in tensors:
        local_part(tensor).zero_()


def choose_attention(run: Run, dtype: torch.dtype, device: torch.device) -> str:
    """Names the kernel of attention.

    Raises:
        MachineError: the run asks for cuDNN's, which is not there.
    """
    if device.type == "cuda":
        is_nvidia = torch.version.hip is None
        if takes_cudnn(run, torch.cuda.get_device_capability(device) if is_nvidia else None):
            if is_nvidia and cudnn_can_attend(run.model.d_head, dtype, device):
                return CUDNN
            if run.kernels.attention == "cudnn":
                raise MachineError(
                    f"kernels.attention='cudnn': torch {torch.__version__} on "
                    f"{device_name(device)} has no attention of cuDNN for this run",
                    "kernels.attention=auto",
                )
    return attention_kernel(run.model.d_head, dtype, device)


@contextmanager
def _convert_complete(parameters: Iterable[LocalParameter]) -> Iterator[None]:
    """Converts each gradient as soon as it is complete, so that few exist in bf16 at a time."""
    hooks = [
        each.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, each=each: each.convert_gradient()
        )
        for each in parameters
        if each.stored.converts_gradient
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(parameters: Iterable[LocalParameter]) -> list[Tensor]:
    """Returns the gradients; none may be a matrix of a block, the only block-scaled kind."""
    gradients = [each.gradient for each in parameters]
    return [gradient for gradient in gradients if isinstance(gradient, Tensor)]
