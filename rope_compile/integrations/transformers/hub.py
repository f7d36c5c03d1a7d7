"""For the ``kernels`` package: the layer ``rotary_pos_emb`` of transformers on ``rope_compile``.

transformers marks its apply functions with that layer name, and ``kernels.kernelize`` puts a layer
of a mapping in their place::

    with kernels.use_kernel_mapping(kernel_mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)

``patch`` does more: it needs no package, knows every form of rotation, and two functions that carry
the same layer name and rotate differently.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from torch import Tensor, nn

from rope_compile.integrations.transformers.forms import Form, rotate

__all__ = ["kernel_mapping"]

_LAYER = "rotary_pos_emb"
_DEVICES = ("cuda", "rocm", "cpu")
# Where the cosines of a pair differ, as in HunYuan-VL, each channel is given its own.
_FORM = Form("half", "full", heads="argument")


class RotaryPosEmb(nn.Module):
    """``apply_rotary_pos_emb`` of Llama and 120 other model files, as a stateless layer."""

    can_torch_compile = True
    has_backward = True

    # A staticmethod would not do: kernels compares the parameters, self included.
    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """q, k ``[batch, heads, seq, head_dim]`` in half style, cos and sin as wide.

        Raises:
            ValueError: cos is narrower than q. Which channels it then is for, and whether they are
                in half style, the layer cannot know; ``patch`` can.
        """
        if cos.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"cos must have the width of q, {q.shape[-1]}, got {cos.shape[-1]}; use "
                "rope_compile.integrations.transformers.patch for this model"
            )
        head = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.dim() - 1
        rotated_q, rotated_k = rotate([q, k], cos, sin, head, _FORM)
        return rotated_q, rotated_k


@dataclass(frozen=True)
class _Repository:
    """What ``kernels`` calls a repository: something that loads a layer class."""

    layer_name: str = _LAYER

    def load(self) -> type[nn.Module]:
        return RotaryPosEmb

    def __str__(self) -> str:
        return "`rope_compile` (layer `RotaryPosEmb`)"


def kernel_mapping() -> dict[str, dict[str, object]]:
    """A mapping for ``kernels.use_kernel_mapping`` or ``kernels.register_kernel_mapping``.

    It serves inference, training and ``torch.compile``, on CUDA, ROCm and CPU devices.

    Raises:
        ImportError: the ``kernels`` package is not installed.
    """
    if importlib.util.find_spec("kernels") is None:
        raise ImportError(
            "kernel_mapping must be used with the kernels package, which is not installed: "
            "pip install kernels, or call rope_compile.integrations.transformers.patch(model)"
        )
    return {_LAYER: dict.fromkeys(_DEVICES, _Repository())}
