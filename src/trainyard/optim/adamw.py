"""AdamW with weight decay on matrices only, in fp32 and in low precision.

In low precision, matrices of blocks take 6 bytes per parameter instead of 16:

    per parameter         elsewhere          matrices of blocks
    weight in use                            bf16, for the forward pass and gathers
    gradient              fp32     4         e4m3     1     from completion to the update
    master weight         fp32     4         fp16     2     rounded stochastically
    first moment          fp32     4         e4m3     1     rounded stochastically
    second moment         fp32     4         fp16     2     rounded stochastically
                          16 bytes           6 bytes, and 4/32 for the scales

An update decodes to fp32, computes, and encodes again. Its steps are often below the resolution of
a code: with rounding to nearest, such weights would never move, and a moment would stay put until a
value a quarter away arrives. Stochastic rounding is right on average. The noise follows from (seed,
updates done, name, position in the whole matrix): the same in every layout and after a resume.

Vectors of blocks are bf16 in use, since ranks gather them together with the matrices, and otherwise
fp32. They and everything outside the blocks use fused AdamW.

Source: the recipe of FP8-LM (arXiv:2310.18313), which scales whole tensors and rounds to nearest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainyard.architecture import UNSCALED, Multipliers
from trainyard.config.precisions import EXPONENTS, MASTER, MOMENTS, SCALED_COLUMNS
from trainyard.config.run import Optimizer
from trainyard.model.dropout import INCREMENT, mix
from trainyard.parallel.model import LocalParameter
from trainyard.parallel.placement import Placement, local_part
from trainyard.precision.block_scaled import BlockScaledTensor, decode, encode, noise, torch_dtype
from trainyard.precision.float8 import FIRST_CAPABILITY

_BITS = {1: torch.uint8, 2: torch.int16}


class AdamW:
    """AdamW by torch's fused kernel, as an `optim.optimizer.LocalOptimizer`.

    The kernel divides gradients by `grad_scale` and skips when `found_inf` is 1, which
    torch.amp.GradScaler uses for loss scaling. Here they also carry the clipping, so gradients are
    read once without a device sync. It is called as torch.optim.AdamW calls it; that class would
    import torch's compiler, which takes half a second.

    Args:
        parameters: of this rank, in one precision.
        settings: of the run; one-dimensional parameters (biases and norms) are not decayed.
        multipliers: of each parameter; absent: all 1.

    Attributes:
        moments: of each parameter by name; empty before the first update.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: Optimizer,
        multipliers: Sequence[Multipliers] = (),
    ) -> None:
        self.parameters = parameters
        multipliers = multipliers or [UNSCALED] * len(parameters)
        self._groups: dict[tuple[float, Multipliers], list[nn.Parameter]] = {}
        for parameter, each in zip(parameters, multipliers, strict=True):
            decay = settings.weight_decay * each.decay if parameter.ndim > 1 else 0.0
            self._groups.setdefault((decay, each), []).append(parameter)
        self._settings = settings
        self.moments: dict[nn.Parameter, dict[str, Tensor]] = {}
        device = parameters[0].device if parameters else None
        self._n_updates = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights."""
        if not self.moments:
            self.prepare_state(0)
        beta1, beta2 = self._settings.betas
        self._n_updates += 1
        for (decay, multipliers), group in self._groups.items():
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            assert len(gradients) == len(group), "each parameter has a gradient"
            moments = [self.moments[parameter] for parameter in group]
            first, second = ([states[name] for states in moments] for name in MOMENTS)
            torch._fused_adamw_(
                list(map(local_part, group)),
                list(map(local_part, gradients)),
                first,
                second,
                [],
                [self._n_updates] * len(group),
                lr=learning_rate * multipliers.rate,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=self._settings.epsilon * multipliers.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
        self._n_updates -= skip

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's moments of a parameter; none before the first update."""
        return self.moments.get(local.parameter, {})

    def prepare_state(self, n_updates: int | None) -> None:
        """Makes zero moments for a checkpoint to fill; None for none, as at the start."""
        self.moments.clear()
        if n_updates is None:
            return
        self._n_updates.fill_(n_updates)
        for parameter in self.parameters:
            values = local_part(parameter)
            self.moments[parameter] = {name: torch.zeros_like(values) for name in MOMENTS}


class Matrix:
    """A matrix of a block, or this rank's shard, with its state before the first update.

    Attributes:
        local: the parameter.
        place: its position in the whole matrix.
        key: of its noise, int64.
        states: master weight and both moments.
    """

    def __init__(self, local: LocalParameter, place: Placement, seed: int) -> None:
        weight = local_part(local.parameter)
        digest = hashlib.sha256(f"rounding {seed} {local.name}".encode()).digest()
        number = int.from_bytes(digest[:8], "little", signed=True)
        self.local, self.place = local, place
        self.key = torch.tensor(number, device=weight.device)
        dtypes = {name: torch_dtype(local.stored.states[name]) for name in (MASTER, *MOMENTS)}
        self.states = {
            name: BlockScaledTensor.zeros(weight.shape, dtype, weight.device)
            for name, dtype in dtypes.items()
        }
        self.states[MASTER].copy_(weight)

    def numbers(self, here: slice) -> Tensor:
        """Numbers blocks of 32 values as in the whole matrix, (n, 1), int64."""
        n_blocks = self.place.local_shape[1] // SCALED_COLUMNS
        index = torch.arange(here.start, here.stop, device=self.key.device)
        rows = self.place.offsets[0] + index // n_blocks
        columns = self.place.offsets[1] // SCALED_COLUMNS + index % n_blocks
        return (rows * (self.place.shape[1] // SCALED_COLUMNS) + columns)[:, None]


class LowPrecisionAdamW:
    """AdamW for a model with bf16 blocks, as an `optim.optimizer.LocalOptimizer`.

    Args:
        parameters: all parameters of this rank, with their positions in the whole.
        settings: of the run.
        seed: of the noise.
        may_compile: compile the update to one pass over the state, where the device can.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[LocalParameter, Placement]],
        settings: Optimizer,
        seed: int,
        may_compile: bool,
    ) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, tuple[LocalParameter, nn.Parameter]] = {}
        plain = []
        for local, place in parameters:
            if MASTER not in local.stored.states:
                plain.append((local.parameter, local.multipliers))
            elif local.parameter.ndim > 1:
                self.matrices[local.name] = Matrix(local, place, seed)
            else:
                master = nn.Parameter(local_part(local.parameter).float())
                self.vectors[local.name] = (local, master)
        plain += [(master, local.multipliers) for local, master in self.vectors.values()]
        self.plain = AdamW([each for each, _ in plain], settings, [m for _, m in plain])
        self._settings = settings
        device = next(iter(self.matrices.values())).key.device
        self._n_updates = torch.zeros((), dtype=torch.int64, device=device)
        compiled = may_compile and _compiles_codes(device)
        self._update = torch.compile(_update, dynamic=True) if compiled else _update

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights with the gradients in `LocalParameter`."""
        for local, master in self.vectors.values():
            assert isinstance(local.converted_gradient, Tensor), local.name
            master.grad = local.converted_gradient
        self.plain.step(learning_rate, divisor, skip)
        for _, master in self.vectors.values():
            master.grad = None
        if self.vectors:
            torch._foreach_copy_(
                [local_part(local.parameter) for local, _ in self.vectors.values()],
                [master.detach() for _, master in self.vectors.values()],
            )
        self._n_updates += skip == 0
        settings = self._settings
        n, (beta1, beta2) = self._n_updates.double(), settings.betas
        of_all = (divisor, skip != 0, (1 - beta1**n).float(), (1 - beta2**n).float())
        rates = {
            rate: torch.full((), learning_rate * rate, device=n.device)  # created without a copy
            for rate in {matrix.local.multipliers.rate for matrix in self.matrices.values()}
        }
        for matrix in self.matrices.values():
            m = matrix.local.multipliers
            step = (rates[m.rate], *of_all)
            epsilon, decay = settings.epsilon * m.epsilon, settings.weight_decay * m.decay
            constants = (beta1, beta2, epsilon, decay)
            key = mix(matrix.key + self._n_updates * INCREMENT)
            gradient = matrix.local.converted_gradient
            assert isinstance(gradient, BlockScaledTensor), matrix.local.name
            weight = local_part(matrix.local.parameter).view(-1, SCALED_COLUMNS)
            tensors_in_chunks = [codes.chunks() for codes in (*matrix.states.values(), gradient)]
            for chunks in zip(*tensors_in_chunks, strict=True):
                here = chunks[0][1]
                tensors = [t for codes, _ in chunks for t in (codes.values, codes.exponents)]
                numbers = matrix.numbers(slice(here.start, here.start + len(tensors[0])))
                self._update(weight[here], tensors, key, numbers, step, constants)

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's states of a parameter by checkpoint name."""
        matrix = self.matrices.get(local.name)
        if matrix is not None:
            return {
                name: tensor
                for what, codes in matrix.states.items()
                for name, tensor in ((what, codes.values), (what + EXPONENTS, codes.exponents))
            }
        _, master = self.vectors.get(local.name, (local, None))
        if master is None:
            return self.plain.state_of(local)
        return {MASTER: master.detach(), **self.plain.moments.get(master, {})}

    def prepare_state(self, n_updates: int | None) -> None:
        """Prepares the states for a checkpoint's; None adopts new weights."""
        self._n_updates.fill_(n_updates or 0)
        self.plain.prepare_state(n_updates)
        if n_updates is None:
            for matrix in self.matrices.values():
                matrix.states[MASTER].copy_(local_part(matrix.local.parameter))
            for local, master in self.vectors.values():
                master.detach().copy_(local_part(local.parameter))


def _compiles_codes(device: torch.device) -> bool:
    """Whether kernels that read and write e4m3 can be compiled: on NVIDIA GPUs since Ada."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def _update(
    weight: Tensor,
    state: Sequence[Tensor],
    key: Tensor,
    numbers: Tensor,
    step: tuple[Tensor, ...],
    constants: tuple[float, ...],
) -> None:
    """Updates blocks of 32 values in place.

    Args:
        weight: bf16, (n, 32).
        state: codes and exponents, (n, 32) and (n, 1), of master weight, first moment, second
            moment and gradient.
        key: of the noise of this matrix and update.
        numbers: of the blocks in the whole matrix, (n, 1).
        step: learning rate, divisor of gradients, whether to skip, and the bias corrections of
            both moments.
        constants: both betas, epsilon and weight decay.
    """
    rate, grad_scale, is_skipped, correction1, correction2 = step
    beta1, beta2, epsilon, decay = constants
    master, first, second, gradient = (decode(*state[i : i + 2]) for i in (0, 2, 4, 6))
    gradient = gradient / grad_scale
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient * gradient
    moved = (first / correction1) / ((second / correction2).sqrt() + epsilon)
    master = master - rate * (moved + decay * master)
    # The purpose of each noise is its number.
    rounded = zip((1, 2, 3), (master, first, second), state[0:6:2], strict=True)
    new = [
        tensor
        for purpose, values, old in rounded
        for tensor in encode(values, old.dtype, noise(mix(key + purpose), numbers))
    ]
    working = decode(new[0], new[1]).to(weight.dtype)
    for old, updated in zip([*state[:6], weight], [*new, working], strict=True):
        bits = _BITS[old.element_size()]
        old = old.view(bits)
        old.copy_(torch.where(is_skipped, old, updated.view(bits)))
