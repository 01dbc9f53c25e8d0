"""The model's matrix products, with random weights: what a step computes beside attention.

Their results go nowhere. Keys, values and queries come from elsewhere, so that a replay can tell whose they are; time
and memory traffic are those of the real products.
"""

from __future__ import annotations

import torch

from gpu_validate.dtypes import KVDtype, get_dtype
from sim.errors import InputError
from sim.serving.models import Model

__all__ = ["Matrices"]


def _refuse_experts(model: Model) -> None:
    if model.experts is not None:
        raise InputError(f"{model.name} has experts: the matrices computed here are those of dense models")


class Matrices:
    """Weights and activations of one model.

    Parameters
    ----------
    model
        Geometry.
    max_tokens
        Most tokens of a step.
    device
        Where they live.
    dtype
        The pool's element type, whose compute type the weights are of.
    seed
        Of the weights.

    Notes
    -----
    Weights have a standard deviation of one over the square root of their input width, so that activations keep their
    size through the layers. Norms and rotations are left out: they are not in the simulator's costs either.
    """

    def __init__(
        self,
        model: Model,
        max_tokens: int,
        *,
        device: torch.device | str = "cpu",
        dtype: str | KVDtype = "bf16",
        seed: int = 0,
    ) -> None:
        _refuse_experts(model)
        self.model = model
        self._kind = get_dtype(dtype).compute
        self._device = torch.device(device)
        self._generator = torch.Generator(device=self._device).manual_seed(seed)
        queries, mlp = model.heads * model.head_dim, model.intermediate * (2 if model.gated_mlp else 1)
        self._qkv = [self._weight(model.hidden, queries + 2 * model.kv_heads * model.head_dim) for _ in self._layers]
        self._o = [self._weight(queries, model.hidden) for _ in self._layers]
        self._up = [self._weight(model.hidden, mlp) for _ in self._layers]
        self._down = [self._weight(model.intermediate, model.hidden) for _ in self._layers]
        self._head = self._weight(model.hidden, model.vocab)
        self._hidden = self._normal(max_tokens, model.hidden)

    @staticmethod
    def bytes_needed(model: Model, max_tokens: int, dtype: str | KVDtype = "bf16") -> int:
        """Return the bytes of the weights and of the activations.

        Raises
        ------
        InputError
            If the model has experts, or a dtype is unknown.
        """
        _refuse_experts(model)
        weights = model.layer_matrix_parameters + model.head_parameters
        widest = model.hidden * 3 + model.heads * model.head_dim + 2 * model.intermediate + model.intermediate
        return (weights + max_tokens * widest) * int(get_dtype(dtype).compute.itemsize)

    def qkv(self, layer: int, tokens: int) -> torch.Tensor:
        """Compute what stands before attention; return [tokens, query, key and value width]."""
        return self._hidden[:tokens] @ self._qkv[layer]

    def rest(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """Compute what stands behind attention; return the new residual stream [tokens, hidden].

        Parameters
        ----------
        layer
            Decoder layer.
        attended
            [tokens, at least the query width], of which attention's output comes first.
        """
        stream = self._hidden[: len(attended)] + attended[:, : self._o[layer].shape[0]] @ self._o[layer]
        up = stream @ self._up[layer]
        if self.model.gated_mlp:
            gate, up = up.chunk(2, dim=1)
            up = torch.nn.functional.silu(gate) * up
        return stream + up @ self._down[layer]

    def layer(self, layer: int, tokens: int) -> torch.Tensor:
        """Compute all products of one layer."""
        return self.rest(layer, self.qkv(layer, tokens))

    def all_layers(self, tokens: int) -> None:
        """Compute all products of all layers."""
        for layer in self._layers:
            self.layer(layer, tokens)

    def head(self, tokens: int) -> torch.Tensor:
        """Compute the output projection; return [tokens, vocabulary]."""
        return self._hidden[:tokens] @ self._head

    @property
    def _layers(self) -> range:
        return range(self.model.layers)

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns).mul_(rows**-0.5)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._kind, device=self._device).normal_(generator=self._generator)
