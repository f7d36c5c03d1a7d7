"""What an import does and does not do, and which module may import which.

Every checker here is also run on a wrong twin, which it must refuse.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rope_compile as rc

from support import run_child

PACKAGE = Path(rc.__file__).parent

# Each module may import only modules of a smaller number. Kernels are apart: they import nothing
# else of the package, and only ``ops`` imports them.
RANK = {
    "checks": 0,
    "scaling": 0.5,
    "axes": 0.5,
    "config": 1,
    "table": 2,
    "ops": 3,
    "distributed": 3.5,  # `functional` imports it when it meets a DTensor
    "functional": 4,
    "inductor": 4,
    "module": 5,
    "selector": 6,
    "factory": 6,
    "capture": 7,
    "": 8,  # rope_compile/__init__.py: the names of all of the above
    "integrations": 9,
    "demo": 10,
    "bench": 11,
    "cli": 12,
}

SHARED_LAYOUT_NAMES = {"kernels.reference.pairings", "kernels.reference.block_bounds"}

PUBLIC = {
    *("RopeConfig", "get_rope", "RotaryEmbedding", "apply_rope", "apply_rope_", "debug"),
    *("DefaultScaling", "LinearScaling", "NtkScaling", "NtkAlphaScaling", "DynamicScaling"),
    *("YarnScaling", "DeepseekYarnScaling", "Llama3Scaling", "LongRopeScaling"),
    *("ProportionalScaling", "ChunkedAxes", "InterleavedAxes", "GlmAxes", "PanguAxes"),
    *("ErnieAxes", "BailingAxes", "XdropeAxes", "AxialAxes"),
    *("positions_from_cu_seqlens", "context_parallel_positions"),
    *("packed_context_parallel_positions", "RopeSelector"),
    *(
        "CapturePlan",
        "prepare_for_capture",
        "capture_guard",
        "__version__",
        "integrations",
        "inductor",
    ),
}


def module_name(path: Path) -> str:
    """``ops`` for rope_compile/ops.py, ``integrations.vllm``, and "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(source: str) -> set[str]:
    """Absolute names of everything that a module imports, at any depth and however lazily."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            names.add(str(node.args[0].value))
    return names


def forbidden(module: str, source: str) -> list[str]:
    """The imports of ``module`` that point up, sideways, into kernels, or at Triton."""
    own = module.split(".")[0]
    bad = []
    for name in sorted(imported(source)):
        top, _, rest = name.partition(".")
        if top == "triton" and module != "kernels.triton_rope":
            bad.append(name)
        if top != "rope_compile" or (module == "" and rest == "integrations"):
            continue  # the package reaches integrations lazily, by name
        target = rest.split(".")[0]
        target = target if target in RANK or target == "kernels" else ""
        if own == "kernels":
            # The plain-torch CPU path is the reference in blocks. Triton shares the names of the
            # layouts with it and no maths.
            if target != "kernels" or (
                module == "kernels.triton_rope" and rest not in SHARED_LAYOUT_NAMES
            ):
                bad.append(name)
        elif target == "kernels":
            if module != "ops":
                bad.append(name)
        elif target == own and own in ("inductor", "integrations", "demo", "bench"):
            continue  # inside a subpackage; its own order is its own affair
        elif RANK[target] >= RANK[own]:
            bad.append(name)
    return bad


def sources() -> dict[str, str]:
    return {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_module_has_a_place_in_the_order():
    """A new module joins the table above deliberately, not by being overlooked."""
    known = {*RANK, "kernels"}
    assert {name.split(".")[0] for name in sources()} <= known


def test_imports_run_one_way():
    bad = {name: forbidden(name, source) for name, source in sources().items()}
    assert not {name: names for name, names in bad.items() if names}


@pytest.mark.parametrize(
    ("module", "twin"),
    [
        ("config", "from rope_compile.factory import get_rope"),  # up
        ("scaling", "from rope_compile.axes import Style"),  # sideways
        ("table", "import rope_compile"),  # the package itself
        ("table", "def f():\n    from rope_compile.ops import rope_op"),  # lazily
        ("functional", "from rope_compile.kernels import reference"),  # past ops
        ("functional", "import importlib\nimportlib.import_module('rope_compile.kernels.cpu')"),
        ("kernels.reference", "from rope_compile.axes import Style"),  # kernels know nobody
        ("kernels.triton_rope", "from rope_compile.kernels import reference"),
        ("kernels.triton_rope", "from rope_compile.kernels.reference import rotate_into"),
        ("ops", "import triton.language as tl"),
        ("cli", "def f():\n    import triton"),
    ],
)
def test_a_wrong_import_would_be_found(module: str, twin: str):
    assert forbidden(module, twin)


def test_public_names_are_exactly_these():
    assert set(rc.__all__) == PUBLIC
    assert rc.__all__ == sorted(rc.__all__)
    assert {name for name in rc.__all__ if not hasattr(rc, name)} == set()


def test_star_import_brings_public_names_only():
    namespace: dict[str, object] = {}
    exec("from rope_compile import *", namespace)
    assert set(namespace) - {"__builtins__"} == PUBLIC


@pytest.mark.parametrize("name", ["triton", "ops_", "rope", "Tensor", "torch"])
def test_other_names_are_not_exported(name: str):
    with pytest.raises(AttributeError, match=name):
        getattr(rc, name)


def test_package_is_typed_and_versioned():
    assert (PACKAGE / "py.typed").is_file()
    assert re.fullmatch(r"\d+\.\d+\.\d+", rc.__version__)


LOADS_NOTHING = """
import sys, torch
before = set(sys.modules)
import rope_compile
new = set(sys.modules) - before
assert "triton" not in sys.modules
assert not torch.cuda.is_initialized()
frameworks = {name.split(".")[0] for name in new} & {"transformers", "vllm", "sglang"}
assert not frameworks, frameworks
late = {f"rope_compile.{name}" for name in ("inductor", "integrations", "demo", "cli")} & new
assert not late, late
"""


def test_import_loads_neither_triton_nor_cuda():
    """Also no adapter and no command line: they look for other frameworks."""
    run_child("-c", LOADS_NOTHING)


ADAPTERS_LOAD_NOTHING = """
import sys, torch
import rope_compile as rc
before = set(sys.modules)
for name in rc.integrations.__all__:
    assert getattr(rc.integrations, name).__name__ == f"rope_compile.integrations.{name}"
new = {name.split(".")[0] for name in set(sys.modules) - before}
peers = {*rc.integrations.__all__, "triton"} & new
assert not peers, peers
"""


def test_every_adapter_is_imported_without_its_peer():
    """An adapter has its peer's signatures, not its peer."""
    files = {path.stem for path in (PACKAGE / "integrations").glob("[a-z]*")}
    assert set(rc.integrations.__all__) == files
    run_child("-c", ADAPTERS_LOAD_NOTHING)


CHANGES_NOTHING = """
import torch
def state():
    settings = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    return *settings, torch.is_grad_enabled(), torch.get_rng_state().tolist()
torch.manual_seed(3)
before = state()
import rope_compile
assert state() == before
"""


def test_import_changes_no_setting_of_torch():
    """Default dtype and device, thread count, grad mode and the global seed stay as they are."""
    run_child("-c", CHANGES_NOTHING)


HIDE_TRITON = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""

WORKS_WITHOUT_TRITON = """
import torch, rope_compile as rc
from torch._subclasses.fake_tensor import FakeTensorMode
from support import assert_near_oracle, oracle_rotate, randn

rope = rc.get_rope(rc.RopeConfig(head_dim=16, max_position=128))
q, positions = randn(5, 3, 16), torch.tensor([0, 7, 127, 4096, -3])
rotated, absent = rope(positions, q)
assert absent is None
assert_near_oracle(rotated, *oracle_rotate(q, positions, rope.inv_freq))
compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(positions, q)[0], rotated)
with FakeTensorMode():
    table, inv_freq = torch.empty(128, 16), torch.empty(8)
    q, positions = torch.empty(5, 3, 16), torch.empty(5, dtype=torch.int64)
    fake, absent = torch.ops.rope_compile.rope(
        q, None, positions, table, inv_freq, [], "half", 0, 1.0, False
    )
    assert fake.shape == (5, 3, 16) and absent is None
"""


def test_without_triton_the_operator_still_works():
    """The schema, the fake and the CPU kernel need no Triton."""
    run_child("-c", HIDE_TRITON + WORKS_WITHOUT_TRITON)


FINDS_NO_TRITON = """
try:
    import rope_compile.kernels.triton_rope
except ModuleNotFoundError as error:
    assert error.name.split(".")[0] == "triton", error
else:
    raise AssertionError("triton was found")
"""


def test_triton_really_was_hidden():
    """The twin of the test above: with Triton hidden, the Triton kernel cannot be imported."""
    run_child("-c", HIDE_TRITON + FINDS_NO_TRITON)
