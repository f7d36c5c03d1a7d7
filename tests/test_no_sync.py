"""No value reaches the host: every public call, on every path that runs for another device.

Three nets. Fake and meta tensors hold no values, so a read raises. They do let a copy to the host
pass, and a read inside an operator, so a dispatch mode refuses those by name. The program that is
traced for CUDA is read for both. Each net is also given functions that do read, and must see it.

A CPU kernel may look at its positions, which are on the host; what is refused on CPU tensors is a
read by the Python around it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rope_compile as rc
from rope_compile import RopeConfig, RotaryEmbedding, factory, ops
from rope_compile.kernels import reference

from inductor_text import StandInDriver

WIDTH = 16
YARN = {"factor": 4.0, "original_max_position": 64}
CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"scaling": rc.LinearScaling(factor=4.0)},
    "ntk": {"scaling": rc.NtkScaling(factor=4.0)},
    "ntk_mixed": {"scaling": rc.NtkScaling(factor=4.0, mixed_b=0.5)},
    "ntk_alpha": {"scaling": rc.NtkAlphaScaling(alpha=100.0)},
    "dynamic_static_factor": {"scaling": rc.DynamicScaling(factor=2.0, policy="static_factor")},
    "dynamic_by_length": {
        "scaling": rc.DynamicScaling(factor=2.0, policy="by_length", original_max_position=64)
    },
    "yarn": {"scaling": rc.YarnScaling(**YARN)},
    "deepseek_yarn": {"scaling": rc.DeepseekYarnScaling(**YARN)},
    "llama3": {
        "scaling": rc.Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
        )
    },
    "longrope": {
        "scaling": rc.LongRopeScaling(
            policy="static",
            short_factor=(1.0,) * (WIDTH // 2),
            long_factor=(2.0,) * (WIDTH // 2),
            original_max_position=64,
            factor=4.0,
        )
    },
    "proportional": {"scaling": rc.ProportionalScaling(partial_rotary_factor=0.5)},
    "interleaved": {"style": "interleaved"},
    "interleaved_to_half": {"style": "interleaved_to_half"},
    "partial": {"rotary_dim": 8},
    "offset": {"rotary_dim": 8, "rotary_offset": 8},
    "no_rotation": {"rotary_dim": 0},
    "float64_phase": {"phase_dtype": torch.float64},
    "chunked_axes": {"axes": rc.ChunkedAxes((2, 3, 3))},
    "interleaved_axes": {"axes": rc.InterleavedAxes((3, 3, 2))},
    "half_blocks": {"axes": rc.AxialAxes((8, 8)), "style": "half_blocks"},
}

# Token dimensions of q and k, and shape of the positions.
SHAPES = {
    "prefill": ((7,), (7,)),
    "batch": ((2, 5), (5,)),
    "batch, own positions": ((2, 5), (2, 5)),
    "decode": ((4, 1), (4, 1)),
    "one position for all": ((7,), (1,)),
    "no tokens": ((0,), (0,)),
    "three token dimensions": ((2, 3, 2), (2,)),
}


def at_operator_level(rope: RotaryEmbedding) -> dict[str, object]:
    config = rope.config
    return {
        "rotary_offset": config.rotary_offset,
        "style": config.style,
        "attention_scaling": config.attention_scaling,
        "axes": config.axes,
    }


# Every public way to rotate, as ``call(rope, positions, q, k)``.
CALLS: dict[str, Callable[..., object]] = {
    "module": lambda rope, at, q, k: rope(at, q, k),
    "module, no k": lambda rope, at, q, _k: rope(at, q),
    "module, inverse": lambda rope, at, q, k: rope(at, q, k, inverse=True),
    "apply_rope": lambda rope, at, q, k: rc.apply_rope(
        q, k, at, rope.cos_sin_cache, inv_freq=rope.inv_freq, **at_operator_level(rope)
    ),
    "apply_rope, clamped": lambda rope, at, q, k: rc.apply_rope(
        q, k, at, rope.cos_sin_cache, inverse=True, **at_operator_level(rope)
    ),
}
IN_PLACE_CALLS: dict[str, Callable[..., object]] = {
    "apply_": lambda rope, at, q, k: rope.apply_(at, q, k),
    "apply_, no k": lambda rope, at, q, _k: rope.apply_(at, q, inverse=True),
    "apply_rope_": lambda rope, at, q, k: rc.apply_rope_(
        q, k, at, rope.cos_sin_cache, inv_freq=rope.inv_freq, **at_operator_level(rope)
    ),
}

# What the nets must catch: the wrong twins, each reads positions. Some by the name of the operator
# that their usual spelling calls: a CPU build of torch cannot index fake CUDA tensors in Python.
READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda at: at.max().item(),
    "if": lambda at: 1 if at.max() > 128 else 2,
    "bool": lambda at: bool(at.any()),
    "tolist": lambda at: at.tolist(),
    "mask": lambda at: torch.ops.aten.index(at, [at > 3]),
    "masked write": lambda at: torch.ops.aten.index_put(at, [at > 3], at),
    "nonzero": lambda at: torch.ops.aten.nonzero(at),
    "unique": lambda at: at.unique(),
    "equal": lambda at: torch.equal(at, at),
    "masked_select": lambda at: at.masked_select(at > 3),
    "repeat_interleave": lambda at: at.repeat_interleave(at),
    "copy to the host": lambda at: at.cpu(),
    "copy from the host": lambda at: torch.zeros(at.shape, device="cpu").to(at.device),
}


def config(**fields: object) -> RopeConfig:
    return RopeConfig(head_dim=WIDTH, max_position=128, **fields)


def calls_of(made: RopeConfig) -> dict[str, Callable[..., object]]:
    moves = made.style == "interleaved_to_half"  # refused in place
    return CALLS if moves else CALLS | IN_PLACE_CALLS


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    factory.registry.clear()
    yield
    factory.registry.clear()


# -------------------------------------------------------------------------------------- the nets


class HostRead(Exception):
    """A value would have reached the host."""


def has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Whether an index is a mask, whose count of true elements the host must know."""
    return any(x is not None and x.dtype == torch.bool for x in indices)


class NoHostReads(TorchDispatchMode):
    """Refuses what reads a value of, or copies from or to, a tensor that is not on ``host``."""

    READING = (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere"),
        *("masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("unique_dim_consecutive", "bincount", "repeat_interleave"),
    )
    COPYING = ("_to_copy", "copy_", "copy")
    INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")

    def __init__(self, host: str | None = "cpu") -> None:
        super().__init__()
        self.host = host
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if name in self.COPYING:
            devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
            refused = len(devices) > 1
        else:
            reading = name in self.READING
            if name in self.INDEXING:
                reading = has_mask(args[1])
            refused = reading and devices != {self.host}
        if refused:
            raise HostRead(f"{func} on {sorted(devices)}")
        return func(*args, **kwargs)


class NoUploads(TorchFunctionMode):
    """Refuses a tensor made of Python numbers on another device: a copy that waits for it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            made_on = torch.device(kwargs.get("device") or "cpu").type
            if made_on != "cpu" and not isinstance(args[0], Tensor):
                raise HostRead(f"{func.__name__} on {made_on}")
        return func(*args, **kwargs)


class RecordedKernel:
    """In the place of the Triton kernel: takes its launches, and needs no GPU."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(type(n) is int for n in grid)

        def launch(**arguments: object) -> None:
            self.launches += 1

        return launch


class Route(TorchFunctionMode):
    """What an operator call runs: its fake, the launcher for CUDA, or the plain-torch fallback."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.name = name
        self.device = "meta" if name == "fallback" else "cuda"
        self.kernel = RecordedKernel()
        self.read: Callable[[Tensor], object] = lambda _positions: None
        self.bodies: dict[object, Callable[..., object]] = {}
        if name == "launcher":
            from rope_compile.kernels import triton_rope

            stand_in = types.SimpleNamespace(launch=triton_rope.launch, rope_kernel=self.kernel)
            patch.setattr(ops, "_triton_module", lambda: stand_in)
        if name != "fake":
            kernel = ops._cuda_kernel if name == "launcher" else reference.rope_into
            pair = ops._make_pair(kernel)
            self.bodies = dict(zip((ops.rope_op, ops.rope_inplace_op), pair, strict=True))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """In front of the dispatcher: what the operator runs is then seen by the nets."""
        if func in (ops.rope_op, ops.rope_inplace_op):
            self.read(args[2])
            func = self.bodies.get(func, func)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def net(self) -> Iterator[NoHostReads]:
        with contextlib.ExitStack() as stack:
            if self.device == "cuda":
                stack.enter_context(FakeTensorMode())
            stack.enter_context(NoUploads())
            stack.enter_context(torch.no_grad())
            net = stack.enter_context(NoHostReads())
            stack.enter_context(self)
            yield net


ROUTES = ("fake", "launcher", "fallback")


@pytest.fixture
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Route:
    return Route(request.param, monkeypatch)


def module_on(device: str, made: RopeConfig) -> RotaryEmbedding:
    """A module whose table is on ``device``; fake CUDA where that is inside a fake mode."""
    if device == "meta":
        return RotaryEmbedding(made, "meta")
    rope = RotaryEmbedding(made, "cpu")
    table = rope.table
    for name, x in table._buffers.items():
        table._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device=device)
    table.device = table.cos_sin_cache.device
    return rope


def tensors(
    device: str, made: RopeConfig, shape: str, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """Positions, q and k: slices of one packed projection, as a model has them."""
    leading, positions = SHAPES[shape]
    if made.num_axes:
        positions = (made.num_axes, *positions)
    packed = torch.empty(*leading, 6, WIDTH, dtype=torch.bfloat16, device=device)
    q, k, _v = packed.split([3, 2, 1], -2)
    return torch.empty(positions, dtype=dtype, device=device), q, k


def call_everything(route: Route, made: RopeConfig) -> int:
    """Every call on every shape; how many operators the net has let pass."""
    with route.net() as net:
        rope = module_on(route.device, made)
        for shape in SHAPES:
            for dtype in (torch.int32, torch.int64):
                for call in calls_of(made).values():
                    call(rope, *tensors(route.device, made, shape, dtype))
        return net.seen


# --------------------------------------------------------------------------- other devices, eager


@pytest.mark.parametrize(
    ("route", "name"),
    # A rotation of width 0 launches nothing, it copies: not on fake CUDA tensors of a CPU build.
    [(r, n) for r in ROUTES for n in CONFIGS if (r, n) != ("launcher", "no_rotation")],
    indirect=["route"],
)
def test_no_call_reads_a_value_of_another_device(route: Route, name: str) -> None:
    made = config(**CONFIGS[name])
    seen = call_everything(route, made)
    calls = 2 * len(calls_of(made))
    assert seen > calls * len(SHAPES)
    if route.name == "launcher":
        # One launch a call; one for each of the two slices where there are three token dimensions,
        # none where there are no tokens.
        assert route.kernel.launches == calls * len(SHAPES)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_a_read_would_be_caught(route: Route, read: str) -> None:
    """The wrong twins, in the place where the operator runs."""
    route.read = READS[read]
    with pytest.raises(HostRead):
        call_everything(route, config())


@pytest.mark.parametrize("route", ["fake", "launcher"], indirect=True)
def test_an_upload_would_be_caught(route: Route) -> None:
    """A list made into a CUDA tensor at every call, as for a map of axes."""
    route.read = lambda at: torch.tensor([0, 1], device=at.device)
    with pytest.raises(HostRead, match="tensor on cuda"):
        call_everything(route, config())


# ------------------------------------------------------------------------ other devices, compiled


class Traced(Exception):
    """The program is traced; nothing is compiled for, or run on, a device."""


def program_for_cuda(function: Callable[..., object], make: Callable[[], tuple]) -> torch.fx.Graph:
    """What AOTAutograd hands to a compiler for fake CUDA tensors of a dynamic token count.

    Inference only; see inductor_text.py.
    """
    from triton.runtime import driver

    found: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _inputs: object) -> None:
        found.append(module.graph)
        raise Traced

    torch.compiler.reset()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    compiled = torch.compile(
        function, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=keep)
    )
    # set_active cannot be undone where no driver works.
    with mock.patch.object(driver, "_active", StandInDriver()), mode, torch.no_grad():
        try:
            compiled(*make())
        except Exception as error:
            if not found:
                raise HostRead("not traced") from error
    return found[0]


def reads_in(graph: torch.fx.Graph) -> list[str]:
    """Nodes that read a value, make a shape of one, or leave the device."""
    found = []
    for node in graph.nodes:
        values = tree_leaves(node.meta.get("val"))
        values = [x for x in values if isinstance(x, (Tensor, torch.SymInt, torch.SymFloat))]
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if (
            name in NoHostReads.READING
            or (name in NoHostReads.INDEXING and has_mask([n.meta["val"] for n in node.args[1]]))
            or free_unbacked_symbols(values)
            or any(x.device.type != "cuda" for x in values if isinstance(x, Tensor))
        ):
            found.append(str(node.target))
    return found


def cuda_inputs(made: RopeConfig, tokens: int = 7) -> tuple[object, ...]:
    """For ``program_for_cuda``: a module and its arguments, none of them a view of another."""
    at = (made.num_axes, tokens) if made.num_axes else (tokens,)
    return (
        module_on("cuda", made),
        torch.empty(at, dtype=torch.int64, device="cuda"),
        *(torch.empty(tokens, heads, WIDTH, device="cuda") for heads in (3, 2)),
    )


# One call of every kind: with and without k, inverse, without frequencies, in place.
TRACED_CALLS = ("module", "apply_rope, clamped", "apply_, no k")
TRACED_CONFIGS = sorted(set(CONFIGS) - {"no_rotation"})  # as above: it launches nothing


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", TRACED_CONFIGS)
def test_the_program_for_cuda_reads_no_value(name: str) -> None:
    made = config(**CONFIGS[name])
    calls = [call for called, call in calls_of(made).items() if called in TRACED_CALLS]

    def everything(rope, at, q, k):
        """Those in place work on fresh tensors."""
        return [(call(rope, at, (x := q * 2), (y := k * 2)), x, y) for call in calls]

    graph = program_for_cuda(everything, lambda: cuda_inputs(made))
    assert reads_in(graph) == []
    # The kernel itself, or the operator in place, which a later pass takes apart.
    kinds = ("triton_kernel_wrapper", "auto_functionalized")
    assert sum(str(n.target).startswith(kinds) for n in graph.nodes) == len(calls)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("read", READS)
def test_a_read_in_the_program_would_be_caught(read: str) -> None:
    """The wrong twins again: named in the program, or refused while it is traced."""

    def reading(rope, at, q, k):
        return rope(at, q, k), READS[read](at)

    made = config()
    found = ["not traced"]
    with contextlib.suppress(HostRead):
        found = reads_in(program_for_cuda(reading, lambda: cuda_inputs(made)))
    assert found


# ------------------------------------------------------------------------- the Python around them


def around_calls(made: RopeConfig) -> None:
    """What a serving loop does around its calls, on CPU tensors, with tables that are there."""
    rope = rc.get_rope(made, "cpu")
    plan = rc.CapturePlan(max_position=64, margin=0)
    rc.prepare_for_capture(rope, plan)
    with NoHostReads(host=None) as net, torch.no_grad():
        assert rc.get_rope(made, "cpu") is rope
        assert not rc.prepare_for_capture(rope, plan).grew
        assert not rope.reserve(100)
        with rc.capture_guard(rope):
            for shape in SHAPES:
                for call in calls_of(made).values():
                    call(rope, *tensors("cpu", made, shape))
        assert net.seen


@pytest.mark.parametrize("name", CONFIGS)
def test_the_python_around_a_call_reads_no_value(name: str) -> None:
    around_calls(config(**CONFIGS[name]))


def test_the_debug_check_reads_and_is_caught() -> None:
    """The wrong twin that the package has: off by default, and what it does is seen."""
    with rc.debug(), pytest.raises(HostRead, match="_local_scalar_dense"):
        around_calls(config())
