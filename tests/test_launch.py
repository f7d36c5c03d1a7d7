"""The eager launch, up to the driver: Triton's own argument binder, on a machine without a GPU.

`tests/test_ptx.py` compiles from a signature it writes itself; here Triton derives it from what the
launcher really passes, packed axis maps included, and says how many binaries that makes.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from rope_compile.kernels import triton_rope

from support import run_child

# Nothing is compiled: Triton calls the hook with each key that is new to it.
BIND = """
import itertools, json, sys
import torch, triton
from triton.runtime import driver
from inductor_text import StandInDriver

class Streams(StandInDriver):
    def get_current_stream(self, device=None):
        return 0

driver.set_active(Streams())
from rope_compile.kernels import triton_rope

keys = set()
triton.knobs.runtime.jit_cache_hook = lambda *, key, **_: keys.add(key) or True

def launch(
    kernel=triton_rope.rope_kernel, lead=(1, 4096), width=128, dtype=torch.bfloat16, style="half",
    axes=(), scaling=1.0, padding=0, positions_from=0, head_dim=None, offset=0,
):
    head_dim = head_dim or width
    def heads(n):
        return torch.empty(*lead, n, head_dim + padding, dtype=dtype, device="meta")[..., :head_dim]
    pairs = [(torch.empty(*lead, n, head_dim, device="meta"), heads(n)) for n in (32, 8)]
    axis_lead = (max(axes) + 1,) if axes else ()
    count = positions_from + torch.Size(lead).numel()
    at = torch.empty(*axis_lead, count, dtype=torch.int64, device="meta")
    at = at[..., positions_from:].unflatten(-1, lead)
    table = torch.empty(4096, width, device="meta")
    inv_freq = torch.empty(width // 2, device="meta")
    grid, arguments = triton_rope.launch_arguments(
        pairs, at, table, inv_freq, axes, style, offset, scaling, False
    )
    kernel.warmup(grid=grid, **arguments)

def count(*calls):
    keys.clear()
    for call in calls:
        launch(**call)
    return len(keys)

# Token counts of every class that Triton could tell apart, and one token of each sequence.
TOKENS = [(1, n) for n in (1, 3, 16, 17, 62, 65, 4096, 100_000)] + [(3, 1), (64, 1), (4, 1024)]
"""


def bind(script: str) -> object:
    return json.loads(run_child("-c", BIND + script))


KINDS = """
found = {}
for width, dtype, style in itertools.product(
    (32, 64, 80, 128, 192), (torch.bfloat16, torch.float32), ("half", "interleaved")
):
    kind = {"width": width, "dtype": dtype, "style": style}
    aligned = [kind | {"lead": lead} for lead in TOKENS]
    odd = [call | {"padding": 1} for call in aligned]
    found[f"{width} {dtype} {style}"] = count(*aligned), count(*aligned, *odd)
print(json.dumps(found))
"""


def test_one_binary_serves_every_token_count() -> None:
    """For each width, dtype and style; memory that is not aligned takes exactly one more."""
    found = bind(KINDS)
    assert len(found) == 20
    assert set(map(tuple, found.values())) == {(1, 2)}, found


TWINS = """
kernel = triton_rope.rope_kernel
specialised = triton.jit(kernel.fn)
counted = triton.jit(kernel.fn, do_not_specialize=tuple(
    name for name in triton_rope.RUNTIME_INTS if name != "heads_per_program"
))
print(json.dumps([
    count(*({"kernel": twin, "lead": lead} for lead in TOKENS)) for twin in (specialised, counted)
]))
"""


def test_a_specialised_count_would_be_seen() -> None:
    """The twins: a kernel that specialises every number, or the heads of a program alone."""
    specialised, counted = bind(TWINS)
    assert specialised > 4
    assert counted > 1


OTHERS = """
alternating = (0, 1, 2) * 20 + (0, 1, 2, 15)
print(json.dumps([
    count({}, {"scaling": 1.25}, {"padding": 8}, {"padding": 64}, {"positions_from": 3}),
    count({}, {"axes": alternating}, {"axes": alternating, "lead": (1, 1)}),
    count({}, {"axes": (0,) * 64}, {"head_dim": 192}, {"head_dim": 192, "offset": 64}),
]))
"""


def test_what_else_shares_a_binary() -> None:
    """Scalings, padded rows and slices of positions do; maps of axes and head widths do not."""
    shared, axes, widths = bind(OTHERS)
    assert shared == 1
    assert axes == 2
    assert widths == 3  # one axis for all lanes is what no axis is


@pytest.mark.parametrize("unbacked", [True, False])
def test_a_symbolic_count_is_launched_with(unbacked: bool) -> None:
    """No branch looks at the count: heads and grid are expressions in it, and no guard is left."""
    env = ShapeEnv()
    n = env.create_unbacked_symint() if unbacked else symbol(env, 77)
    with FakeTensorMode(shape_env=env):
        q, k = (torch.empty(1, n, heads, 128, device="cuda") for heads in (32, 8))
        positions = torch.empty(1, n, dtype=torch.int64, device="cuda")
        table, inv_freq = torch.empty(4096, 128, device="cuda"), torch.empty(64, device="cuda")
        guards = len(env.guards)  # of making the tensors
        grid, arguments = triton_rope.launch_arguments(
            [(q, q), (k, k)], positions, table, inv_freq, (), "half", 0, 1.0, False
        )
    assert len(env.guards) == guards
    assert isinstance(arguments["heads_per_program"], torch.SymInt)
    assert all(isinstance(size, torch.SymInt) for size in grid)
    assert arguments["ALIGN"] == 8
    for count, heads in ((1, 1), (700, 3), (4096, 8)):
        values = {n.node.expr: count}
        assert arguments["heads_per_program"].node.expr.subs(values) == heads
        groups = -(-32 // heads) - (-8 // heads)
        assert [size.node.expr.subs(values) for size in grid] == [groups, -(-count // 8), 1]


def symbol(env: ShapeEnv, hint: int) -> torch.SymInt:
    """A backed symbol, as a dynamic dimension has one."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource("n")
    return env.create_symintnode(
        env.create_symbol(hint, source, DimDynamic.DYNAMIC), hint=hint, source=source
    )
