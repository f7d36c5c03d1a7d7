"""Reads the code that Inductor writes for an H200, on a machine without a GPU.

``torch.compile`` runs on fake CUDA tensors and is stopped once the wrapper text exists. Inductor
asks a device a few questions on the way; here they are answered for an H200. Inference graphs
only: autograd on fake CUDA tensors needs a torch that is linked with CUDA, and a CPU build ends
the process instead of raising. So the cases run in a process of their own:
``python inductor_text.py CASE ...`` prints what it found as JSON.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import rope_compile as rc

TOKENS = 77  # a prime, equal to no other size

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    gcnArchName="",
    warp_size=32,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=141 << 30,
    L2_cache_size=60 << 20,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)


class StandInDriver:
    """What Triton and Inductor ask a driver before anything is compiled."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda _device: {
            "max_shared_mem": H200.shared_memory_per_block_optin,
            "multiprocessor_count": H200.multi_processor_count,
        }
    )

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> object:
        return torch.cuda


class TextCaptured(Exception):
    """The wrapper is written; nothing is compiled for, or run on, a device."""


@contextlib.contextmanager
def pretend_h200() -> Iterator[list[str]]:
    """Answer for an H200, and collect wrapper texts instead of running them."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.fx_passes.reinplace as reinplace
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from triton.runtime import driver

    texts: list[str] = []
    codegen = GraphLowering.codegen

    def capture(self: GraphLowering) -> None:
        wrapper, _kernels = codegen(self)
        texts.append(wrapper.value)
        raise TextCaptured

    driver.set_active(StandInDriver())
    index = {"current_device": lambda: 0, "get_device_properties": lambda _device=None: H200}
    interface = index | {
        "is_available": lambda: True,
        "get_compute_capability": lambda _device=None: 90,
        "is_bf16_supported": lambda including_emulation=False: True,
        "is_triton_capable": lambda _device=None: True,
        "raise_if_triton_unavailable": lambda _device=None: None,
    }
    module = index | {
        "get_device_capability": lambda _device=None: (9, 0),
        "device_count": lambda: 1,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in interface.items():
            patch = mock.patch.object(CudaInterface, name, staticmethod(answer), create=True)
            stack.enter_context(patch)
        for name, answer in index.items():
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(answer)))
        for name, answer in module.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # The tables of attention patterns trace real CUDA tensors when they are first built.
        for passes in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(passes, "lazy_init"))
        # Checks a scatter's shape by a copy_ between fake CUDA tensors, which a CPU build refuses.
        stack.enter_context(
            mock.patch.object(reinplace, "_inplace_generalized_scatter", lambda x, _src, _ops: x)
        )
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", capture))
        stack.enter_context(config.patch(compile_threads=1))
        yield texts


def inductor_text(
    function: Callable[..., object],
    make_arguments: Callable[[], tuple[Tensor, ...]],
    *,
    dynamic: bool | None = None,
) -> str:
    """The wrapper and kernels that Inductor writes; arguments are made as fake CUDA tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    torch._dynamo.reset()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with pretend_h200() as texts, torch.no_grad(), mode:
        arguments = make_arguments()
        try:
            torch.compile(function, fullgraph=True, dynamic=dynamic)(*arguments)
        except Exception:
            if not texts:
                raise
    assert len(texts) == 1, f"{len(texts)} graphs"
    return texts[0]


@dataclasses.dataclass
class Facts:
    """What the tests ask of a wrapper."""

    launches: list[str]  # name of every kernel that the wrapper runs, in order
    rope_arguments: list[str]  # the text of each rope launch
    rope_constants: dict[str, int | bool]  # what the rope kernel is compiled for
    opaque_calls: int  # torch.ops.rope_compile in the wrapper
    allocations: int
    copies: list[str]  # Inductor's names of its kernels that clone or copy


def facts(text: str) -> Facts:
    body = text[re.search(r"^\s*def call\(", text, re.M).start() :]
    launches = re.findall(r"(\w+)\.run\((.*?)\)\n", body, re.S)
    rope_source = text[text.index("async_compile.triton('rope_kernel'") :]
    constants = re.search(r"'constants': (\{.*?\})", rope_source, re.S)
    return Facts(
        launches=[name for name, _ in launches],
        rope_arguments=[call for name, call in launches if name.startswith("rope_kernel")],
        rope_constants=ast.literal_eval(constants[1]),
        opaque_calls=body.count("torch.ops.rope_compile"),
        allocations=len(re.findall(r"= empty_strided_cuda\(", body)),
        copies=[name for name, _ in launches if re.search(r"clone|copy", name)],
    )


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def tokens(x: Tensor) -> Tensor:
    """Mark the first dimension, a token count, as one that varies."""
    torch._dynamo.mark_dynamic(x, 0)
    return x


def table() -> tuple[Tensor, Tensor]:
    """A table of 4096 rows of width 128 and its frequencies."""
    return cuda(4096, 128, dtype=torch.float32), cuda(64, dtype=torch.float32)


def positions() -> Tensor:
    return cuda(TOKENS, dtype=torch.int64)


def q_and_k() -> tuple[Tensor, Tensor]:
    return cuda(TOKENS, 32, 128), cuda(TOKENS, 8, 128)


def projection() -> tuple[Tensor, Tensor]:
    return cuda(TOKENS, 4096), cuda(4096, 6144)


def rotate(at, cache, inv_freq, q, k, **more):
    return rc.apply_rope(q, k, at, cache, inv_freq=inv_freq, **more)


def interleaved(at, cache, inv_freq, q, k):
    return rotate(at, cache, inv_freq, q, k, style="interleaved")


def q_only(at, cache, inv_freq, q):
    return rotate(at, cache, inv_freq, q, None)[0]


def packed_qkv(at, cache, inv_freq, x, weight):
    """A projection, its slices rotated, and work behind it: nothing of it may become a copy."""
    q, k, v = (x @ weight).view(-1, 48, 128).split([32, 8, 8], 1)
    q, k = rotate(at, cache, inv_freq, q, k)
    return q.relu(), k, v


def in_place(at, cache, inv_freq, x, weight):
    """The same, rotated where the projection wrote it."""
    q, k, v = (x @ weight).view(-1, 48, 128).split([32, 8, 8], 1)
    rc.apply_rope_(q, k, at, cache, inv_freq=inv_freq)
    return q.relu(), k.relu(), v.relu()


def transposed(at, cache, inv_freq, q, k):
    """The layout of transformers, [batch, heads, seq, head_dim], seen through a view."""
    q, k = rotate(at, cache, inv_freq, q.transpose(1, 2), k.transpose(1, 2))
    return q.transpose(1, 2), k.transpose(1, 2)


def in_place_whole(at, cache, inv_freq, q, k):
    q, k = q * 2, k * 2
    rc.apply_rope_(q, k, at, cache, inv_freq=inv_freq)
    return q, k


def copied(at, cache, inv_freq, q, k):
    """The wrong twin: its caller makes q contiguous first, which the checks must see."""
    copy = q.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return rotate(at, cache, inv_freq, copy, k)


Make = Callable[[], tuple[Tensor, ...]]
# Name -> function, its tensors behind the table, dynamic.
CASES: dict[str, tuple[Callable[..., object], Make, bool | None]] = {
    "plain": (rotate, q_and_k, None),
    "dynamic": (rotate, q_and_k, True),
    "partial_dynamic": (rotate, lambda: (cuda(TOKENS, 32, 192), cuda(TOKENS, 8, 192)), True),
    "interleaved": (interleaved, q_and_k, None),
    "q_only": (q_only, lambda: q_and_k()[:1], None),
    "packed_qkv": (packed_qkv, projection, None),
    "packed_qkv_tokens": (packed_qkv, lambda: (tokens(projection()[0]), projection()[1]), None),
    "transposed": (transposed, lambda: (cuda(3, 32, TOKENS, 128), cuda(3, 8, TOKENS, 128)), None),
    "in_place": (in_place, projection, None),
    "in_place_whole": (in_place_whole, q_and_k, None),
    "copied": (copied, lambda: (cuda(32, TOKENS, 128), cuda(TOKENS, 8, 128)), None),
}


def run(name: str) -> Facts:
    function, make, dynamic = CASES[name]
    at = positions if name != "packed_qkv_tokens" else lambda: tokens(positions())
    return facts(inductor_text(function, lambda: (at(), *table(), *make()), dynamic=dynamic))


if __name__ == "__main__":
    found = {name: dataclasses.asdict(run(name)) for name in sys.argv[1:]}
    sys.stdout.write(json.dumps(found))
