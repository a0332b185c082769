"""Optimisers on fp32 master weights, and a schedule that follows elapsed time.

The model computes in the dtype that it ships in (bf16 on CUDA); the optimiser updates fp32
masters and rounds them into the model after each step, so what is evaluated is what ships.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from oled_sim.model.training.recipe import Optimizer

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_RMS = 0.2


class Trainable:
    """Steps a model's parameters by fp32 masters.

    Matrices of the layers take Muon or AdamW, everything else AdamW.
    """

    def __init__(self, model: nn.Module, recipe: Optimizer) -> None:
        self.recipe = recipe
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        pairs = list(zip(named, self.masters, strict=True))
        matrices = [master for (name, p), master in pairs if is_layer_matrix(name, p)]
        rest = [master for (name, p), master in pairs if not is_layer_matrix(name, p)]
        self._matrices = _matrix_optimizer(matrices, recipe)
        self._rest = _adamw(rest, recipe, recipe.rate)

    @torch.no_grad()
    def step(self, factor: float) -> Tensor:
        """Apply the gradients at ``factor`` times the peak rates; return their norm."""
        gradients = [_gradient(parameter) for parameter in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        for optimizer, rate in (
            (self._matrices, self.recipe.matrix_rate),
            (self._rest, self.recipe.rate),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (K. Jordan et al., "Muon", 2024).

    Stacked matrices [.., m, n] are orthogonalised one by one, equal shapes in one batch. The
    update is scaled to the root mean square of an AdamW update, 0.2 ("Muon is scalable for LLM
    training", 2025, equation 4), so that learning rates of AdamW carry over.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group)

    def _step_alike(self, parameters: list[Tensor], group: dict[str, float]) -> None:
        gradients = [_gradient(parameter) for parameter in parameters]
        buffers = [self._buffer(parameter) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov
        updates = orthogonalise(torch.stack(ahead)).float()
        scale = _RMS * max(updates.shape[-2:]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(updates.unbind(0)), alpha=-group["lr"] * scale)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix [.., m, n] near 1; bf16 on CUDA."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of a layer: attention, dense MLP or expert, not router."""
    return ".layers." in name and parameter.dim() >= 2 and ".gate.weight" not in name


def rate_factor(progress: float, recipe: Optimizer) -> float:
    """Return the factor on the peak rate at ``progress``, the elapsed share of the time."""
    if progress < recipe.warmup:
        return progress / recipe.warmup
    return min(1.0, max(0.0, (1.0 - progress) / (1.0 - recipe.decay_from)))


def _gradient(parameter: Tensor) -> Tensor:
    """Return the fp32 gradient, zero where the loss did not reach the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float()


def _matrix_optimizer(masters: list[Tensor], recipe: Optimizer) -> torch.optim.Optimizer:
    if recipe.matrices == "muon":
        return Muon(masters, recipe.matrix_rate, recipe.betas[0], recipe.weight_decay)
    return _adamw(masters, recipe, recipe.matrix_rate)


def _adamw(masters: list[Tensor], recipe: Optimizer, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        masters, lr=rate, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
