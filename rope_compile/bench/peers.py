"""Other implementations of the same rotation, and the conversions that they need."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from rope_compile.bench import formulas
from rope_compile.bench.case import Case, Pair
from rope_compile.bench.providers import Missing, Provider
from rope_compile.bench.shapes import OUT_EXISTING, OUT_FRESH, Cell
from rope_compile.bench.timers import Prepared

__all__ = ["PEERS", "heads_first", "liger_function", "peers", "tokens_first"]

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

# Names for --peers; "hf" is the formula of transformers' model files.
PEERS = {
    "hf_eager": "the formula of transformers, eager",
    "hf_compiled": "the same through torch.compile",
    "hf_compiled_pointwise_cat": "compiled with force_pointwise_cat (CPU)",
    "hf_compiled_combo": "compiled with combo_kernels (GPU)",
    "hf_compiled_apart": "compiled, the two channels of a pair written to separate tensors",
    "rotary_embedding_torch": "the package of that name (interleaved style)",
    "onnxruntime": "its RotaryEmbedding operator (CPU, float32 and float16)",
    "liger": "liger-kernel (GPU, half style)",
}


def peers(cell: Cell, device: torch.device, names: tuple[str, ...] = ()) -> list[Provider]:
    """The peers that make sense for a shape and device, and the conversions that those need.

    Compiled ones are compiled once, with a dynamic token count: keep the list for all tokens of a
    shape, dtype and thread count.
    """
    shape, on_cpu = cell.shape, device.type == "cpu"
    is_half = shape.style == "half"
    formula = _over_heads(formulas.half if is_half else formulas.interleaved)
    apart: Formula = formulas.half_apart if is_half else formulas.interleaved_apart
    found: dict[str, Callable[[Case], Prepared]] = {
        "hf_eager": functools.partial(_formula, formula=formula),
        "hf_compiled": functools.partial(_formula, formula=_compiled(formula)),
    }
    if on_cpu:
        found["hf_compiled_pointwise_cat"] = functools.partial(
            _formula, formula=_compiled(formula, force_pointwise_cat=True)
        )
    else:
        found["hf_compiled_combo"] = functools.partial(
            _formula, formula=_compiled(formula, combo_kernels=True)
        )
    found["hf_compiled_apart"] = functools.partial(_apart, formula=_compiled(apart))
    if not is_half:
        found["rotary_embedding_torch"] = _rotary_embedding_torch
    if on_cpu:
        found["onnxruntime"] = functools.partial(_onnxruntime, session_for=_Sessions())
    if not on_cpu and is_half and shape.rotary_dim == shape.head_dim:
        found["liger"] = _liger
    chosen = {name: prepare for name, prepare in found.items() if not names or name in names}
    providers = [
        Provider(name, OUT_EXISTING if name == "onnxruntime" else OUT_FRESH, "peer", prepare)
        for name, prepare in chosen.items()
    ]
    if any(name.startswith("hf") for name in chosen):
        providers.append(Provider("gather of cos and sin", OUT_FRESH, "conversion", _gather))
    if "hf_compiled_apart" in chosen:
        providers.append(Provider("joining the parts", OUT_FRESH, "conversion", _join))
    if chosen and shape.q_row:
        providers.append(
            Provider("slices to contiguous", OUT_FRESH, "conversion", _contiguous, rotated=False)
        )
    return providers


def _over_heads(formula: Formula) -> Formula:
    """With the two ``unsqueeze`` that transformers' function does in every call."""

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return formula(q, k, cos.unsqueeze(1), sin.unsqueeze(1))

    return call


def _compiled(formula: Formula, **options: bool) -> Formula:
    compiled: Formula = torch.compile(formula, dynamic=True, options=dict(options) or None)
    return compiled


def heads_first(x: Tensor) -> Tensor:
    """``[1, heads, tokens, head_dim]``: the transposed view that transformers' attention makes."""
    return x[None].transpose(1, 2)


def _as_models_do(case: Case) -> Pair:
    q, k = map(heads_first, case.contiguous)
    return q, k


def tokens_first(result: tuple[Tensor, ...]) -> Pair:
    q, k = (x.transpose(1, 2)[0] for x in result)
    return q, k


def _formula(case: Case, formula: Formula) -> Prepared:
    """cos and sin come gathered: transformers does that once for all layers."""
    cos, sin = (x[None] for x in case.cos_sin(full=True))
    call = functools.partial(formula, *_as_models_do(case), cos, sin)
    return Prepared(call, lambda: tokens_first(call()))


def _parts(case: Case, formula: Formula) -> Callable[[], tuple[Tensor, ...]]:
    cos, sin = (x[None, None] for x in case.cos_sin(full=False))
    return functools.partial(formula, *_as_models_do(case), cos, sin)


def _joiner(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return formulas.join_half if case.cell.shape.style == "half" else formulas.stack_pairs


def _apart(case: Case, formula: Formula) -> Prepared:
    call, join = _parts(case, formula), _joiner(case)

    def result() -> Pair:
        parts = call()
        return tokens_first((join(*parts[:3]), join(*parts[3:])))

    return Prepared(call, result)


def _join(case: Case) -> Prepared:
    """What `_apart` needs before anybody can use its result as a head."""
    half = case.cell.shape.style == "half"
    parts = _parts(case, formulas.half_apart if half else formulas.interleaved_apart)()
    join = _joiner(case)

    def call() -> Pair:
        return join(*parts[:3]), join(*parts[3:])

    return Prepared(call, lambda: tokens_first(call()))


def _gather(case: Case) -> Prepared:
    """Rows of the cos and the sin table of full width, as older model files keep them."""
    rows = case.positions if not case.cell.shape.axes else case.positions[0]
    table = case.rope.cos_sin_cache.to(case.dtype)
    width = table.shape[1] // 2
    cos, sin = (half.repeat(1, 2) for half in table.split(width, dim=1))
    return Prepared(lambda: (cos[rows], sin[rows]))


def _contiguous(case: Case) -> Prepared:
    def call() -> Pair:
        return case.q.contiguous(), case.k.contiguous()

    return Prepared(call, call)


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{package} cannot be imported ({error}); pip install {package}") from None


def _rotary_embedding_torch(case: Case) -> Prepared:
    """Its function for given angles; it takes their cosine and sine in every call."""
    apply: Callable[[Tensor, Tensor], Tensor] = _import(
        "rotary_embedding_torch", "rotary-embedding-torch"
    ).apply_rotary_emb
    config = case.cell.shape.config
    inv_freq = config.inv_freq().to(case.device).double()
    if config.axes is None:
        positions = case.positions.double()[:, None]
    else:
        positions = case.positions[torch.tensor(config.lane_axes, device=case.device)].t().double()
    angles = (positions * inv_freq).float().repeat_interleave(2, dim=-1)
    q, k = _as_models_do(case)

    def call() -> Pair:
        return apply(angles, q), apply(angles, k)

    return Prepared(call, lambda: tokens_first(call()))


class _Sessions:
    """One onnxruntime session for a shape, dtype and thread count, with its cos and sin tables."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int], tuple[object, Pair]] = {}

    def __call__(self, case: Case) -> tuple[object, Pair]:
        cell = case.cell
        key = (cell.shape.id, cell.dtype, torch.get_num_threads())
        if key not in self._made:
            table = case.rope.cos_sin_cache.to(case.dtype)
            cos, sin = (x.contiguous() for x in table.split(table.shape[1] // 2, dim=1))
            self._made[key] = (_session(cell), (cos, sin))
        return self._made[key]


def _session(cell: Cell) -> object:
    """A graph of two nodes, one for q and one for k, both ``[1, tokens, heads * head_dim]``."""
    runtime = _import("onnxruntime", "onnxruntime")
    onnx = _import("onnx", "onnx")
    if cell.dtype == "bfloat16":
        raise Missing("onnxruntime has no bfloat16 RotaryEmbedding for CPUs")
    shape, helper, kinds = cell.shape, onnx.helper, onnx.TensorProto
    if shape.axes is not None:
        raise Missing("onnxruntime's RotaryEmbedding has one position axis")
    kind = kinds.FLOAT if cell.dtype == "float32" else kinds.FLOAT16
    sizes = {"q": shape.q_heads, "k": shape.k_heads}
    lanes = shape.rotary_dim // 2
    nodes = [
        helper.make_node(
            "RotaryEmbedding",
            [name, "positions", "cos", "sin"],
            [f"{name}_out"],
            domain="com.microsoft",
            interleaved=int(shape.style == "interleaved"),
            num_heads=heads,
            rotary_embedding_dim=0 if shape.rotary_dim == shape.head_dim else shape.rotary_dim,
        )
        for name, heads in sizes.items()
    ]
    value = helper.make_tensor_value_info
    widths = {name: heads * shape.head_dim for name, heads in sizes.items()}
    inputs = [value(name, kind, [1, None, width]) for name, width in widths.items()]
    inputs.append(value("positions", kinds.INT64, [1, None]))
    inputs += [value(name, kind, [None, lanes]) for name in ("cos", "sin")]
    outputs = [value(f"{name}_out", kind, [1, None, width]) for name, width in widths.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "rope", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Its threads would spin on while the next provider is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session: object = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session


def _onnxruntime(case: Case, session_for: _Sessions) -> Prepared:
    """Bound to torch's memory on both sides, so that no tensor is converted."""
    session, (cos, sin) = session_for(case)
    import numpy

    q, k = case.contiguous
    q_out, k_out = out = case.poisoned()
    binding = session.io_binding()  # type: ignore[attr-defined]
    dtype = numpy.float32 if case.dtype == torch.float32 else numpy.float16
    flat = {"q": q.flatten(1)[None], "k": k.flatten(1)[None], "cos": cos, "sin": sin}
    for name, x in flat.items():
        binding.bind_input(name, "cpu", 0, dtype, list(x.shape), x.data_ptr())
    positions = case.positions[None]
    binding.bind_input(
        "positions", "cpu", 0, numpy.int64, list(positions.shape), positions.data_ptr()
    )
    for name, x in {"q_out": q_out, "k_out": k_out}.items():
        shape = [1, x.shape[0], x.shape[1] * x.shape[2]]
        binding.bind_output(name, "cpu", 0, dtype, shape, x.data_ptr())
    # The tensors must live as long as the binding that has their addresses.
    run = functools.partial(_run_bound, session, binding, (flat, positions, out))

    def result() -> Pair:
        run()
        return out

    return Prepared(run, result)


def _run_bound(session: object, binding: object, alive: object) -> None:
    del alive
    session.run_with_iobinding(binding)  # type: ignore[attr-defined]


def liger_function() -> type[torch.autograd.Function]:
    """Raises `Missing` where the package is not installed."""
    function: type[torch.autograd.Function] = _import(
        "liger_kernel.ops.rope", "liger-kernel"
    ).LigerRopeFunction
    return function


def _liger(case: Case) -> Prepared:
    """``[1, heads, tokens, head_dim]`` views of its own memory layout; it writes in place."""
    function = liger_function()
    cos, sin = (x[None] for x in case.cos_sin(full=True))
    q, k = (heads_first(x.clone()) for x in case.contiguous)

    def call() -> tuple[Tensor, ...]:
        rotated: tuple[Tensor, ...] = function.apply(q, k, cos, sin)
        return rotated

    return Prepared(call, lambda: tokens_first(call()))
