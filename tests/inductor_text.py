"""Reads the code that Inductor writes for an H200, on a machine without a GPU.

``torch.compile`` runs on fake CUDA tensors and is stopped once the wrapper text exists. Inductor
asks a device a few questions on the way; here they are answered for an H200. Training graphs need a
torch that is linked with CUDA: a CPU build ends the process instead of raising. So this runs in a
process of its own, and hands what it found over as JSON (`Found`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, fx

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
def pretend_h200() -> Iterator[list[Found]]:
    """Answer for an H200, and collect what Inductor writes instead of running it."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    import torch._inductor.fx_passes.reinplace as reinplace
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from triton.runtime import driver

    found: list[Found] = []
    codegen = GraphLowering.codegen

    def capture(self: GraphLowering) -> None:
        wrapper, _kernels = codegen(self)
        guards = [str(guard.expr) for guard in self.sizevars.shape_env.guards]
        found.append(read(wrapper.value, guards))
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
        yield found


def inductor_code(
    function: Callable[..., object],
    make_arguments: Callable[[], tuple[Tensor, ...]],
    *,
    dynamic: bool | None = None,
) -> Found:
    """What Inductor writes for one inference graph; arguments are made as fake CUDA tensors."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graphs = {}

    def inner(graph: fx.GraphModule, inputs: object, **options: object) -> object:
        graphs["aot"] = printed(graph)
        return compile_fx_inner(graph, inputs, **options)

    def backend(graph: fx.GraphModule, inputs: object) -> object:
        graphs["dynamo"] = printed(graph)
        return compile_fx(graph, inputs, inner_compile=inner)

    torch._dynamo.reset()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with pretend_h200() as found, torch.no_grad(), mode:
        arguments = make_arguments()
        try:
            torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*arguments)
        except Exception:
            if not found:
                raise
    assert len(found) == 1, f"{len(found)} graphs"
    return dataclasses.replace(found[0], **graphs)


@dataclasses.dataclass
class Found:
    """What the tests ask of a compiled graph; ``calls`` is the code that runs at every call."""

    calls: str
    launches: list[str]  # name of every Triton kernel that it runs, in order
    libraries: list[str]  # and of every other one: extern_kernels.mm, torch.ops...
    rope: list[dict[str, str]]  # arguments of each rope launch, and its "grid"
    constants: list[dict[str, int | bool]]  # what each rope kernel is compiled for
    aligned: list[list[str]]  # its arguments that are known to be multiples of 16
    allocations: int
    guards: list[str]  # on symbolic sizes
    dynamo: str = ""  # Dynamo's graph and the functional one, see `printed`
    aot: str = ""

    @property
    def others(self) -> list[str]:
        """Every kernel but ours."""
        names = [name for name in self.launches if not name.startswith("rope_kernel")]
        return names + self.libraries


def read(text: str, guards: list[str]) -> Found:
    """The facts in a whole module that Inductor wrote."""
    start = re.search(r"^ *def call\(", text, re.M).start()
    lines = text[start : text.index("\nrunner = ")].splitlines()
    calls = "\n".join(line.strip() for line in lines if not line.strip().startswith("#"))
    launches = re.findall(r"^(\w+)\.run\((.*), stream=\w+\)$", calls, re.M)
    sources = text.split("async_compile.triton('rope_kernel'")[1:]
    metas = [
        [
            ast.literal_eval(re.search(rf"'{key}': (\[?\{{.*?\}}\]?)", x)[1])
            for key in ("signature", "constants", "configs")
        ]
        for x in sources
    ]
    return Found(
        calls=calls,
        launches=[name for name, _ in launches],
        libraries=re.findall(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", calls),
        rope=[arguments(call) for name, call in launches if name.startswith("rope_kernel")],
        constants=[constants for _, constants, _ in metas],
        aligned=[[list(names)[i] for (i,) in configs[0]] for names, _, configs in metas],
        allocations=calls.count("= empty_strided_cuda("),
        guards=guards,
    )


def arguments(call: str) -> dict[str, str]:
    """The text of every argument of a rope launch by its name."""
    from rope_compile.kernels.triton_rope import rope_kernel

    names = [param.name for param in rope_kernel.params if not param.is_constexpr]
    texts = [ast.unparse(node) for node in ast.parse(f"f({call})").body[0].value.args]
    named = dict(zip(names, texts, strict=False))
    return named | {"grid": ", ".join(texts[len(names) :])}


def printed(graph: fx.GraphModule) -> str:
    """One line a node, numbered; of a Triton launch only its tensors. The same in every torch."""
    names: dict[fx.Node, Name] = {}
    lines = []
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, args[0]))}")
            continue
        names[node] = Name(f"%{len(names)}")
        if node.op == "placeholder":
            continue
        given = [str(value) for value in args]
        pointers = kwargs.get("kwargs", {})  # of a launch
        for name in pointers:
            new_line = "\n    " if name in ("q_ptr", "positions_ptr") else ""
            given += [f"{new_line}{name}={pointers[name]}"] if name.endswith("_ptr") else []
        target = node.target
        if not isinstance(target, torch._ops.OperatorBase | str):
            target = target.__name__
        given = ", ".join(given).replace(", \n", ",\n")
        lines.append(f"{names[node]} = {target}({given})")
    return "\n".join(lines)


class Name(str):
    """A node in a printed argument."""

    __slots__ = ()
    __repr__ = str.__str__


def cuda(*shape: int | torch.SymInt, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def unbacked() -> torch.SymInt:
    """A size nobody knows, as ``mark_unbacked`` makes them (which fake tensors do not heed)."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode().shape_env.create_unbacked_symint()
