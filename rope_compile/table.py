"""`RopeTable`: cos/sin rows, filled once, reserved ahead of capture, never silently dead.

NOTE [Plain tensors] A table outlives whatever happened to be active when it was built: inference
mode, a fake-tensor mode, a functional transform, a trace. Every tensor here is made inside
`plain_tensors`, with dtype and device spelled out, so that it is an ordinary tensor ever after.

NOTE [One cosine] ``torch.cos`` on the CPU leaves blocks of some thousand elements to MKL's threads,
and the first such call of a process is sometimes inaccurate in a part of the tensor (seen on torch
2.13: float32 errors of 1.5e-4 in about 1 of 60 processes). ``torch.polar`` takes cosine and sine of
the C library, one element after the other: a row's bits depend on the row alone, never on the
number of rows or of threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

# Private, the only such imports of this module. tests/test_table.py fails when one of them moves
# or stops doing what plain_tensors needs. Public torch has no way out of an active mode.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from rope_compile.checks import LARGEST_ROWS, at_most, device_of, making_on, size
from rope_compile.config import RopeConfig

P = ParamSpec("P")
T = TypeVar("T")

ROW_MULTIPLE = 128
_BLOCK_ELEMENTS = 2**18  # bounds the memory beside the table: 6 MB
_META = torch.device("meta")


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """No grad, no inference mode, no function or dispatch mode, no functorch level."""
    with (
        torch.no_grad(),
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
    ):
        yield


def _eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo out of ``function`` and of all that it calls.

    After a graph break Dynamo goes on to compile the functions that the broken one calls, and the
    bits of a row must not depend on the cosine that a compiler picks. (Not as a decorator of
    ``torch.compiler``: importing this package would import Dynamo, and with it Triton.)
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules:
            eager: Callable[P, T] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def stream_is_capturing() -> bool:
    """Whether the current CUDA stream records a graph; False where CUDA was never started."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def canonical_device(device: torch.device | str | int | None) -> torch.device:
    """The device that a tensor made there reports: ``"cuda"`` becomes ``cuda:<current>``.

    None means the default device, which follows ``torch.set_default_device`` and
    ``with torch.device(...)``.

    Raises:
        TypeError, ValueError: no device, or none of this machine.
    """
    device = torch.get_default_device() if device is None else device_of(device)
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device.index is not None:
        return device
    with plain_tensors(), making_on(device):
        return torch.empty(0, device=device).device


def row_count(name: str, value: object) -> int:
    """A number of rows: an int, not negative.

    Raises:
        TypeError: not an int, or a bool. ValueError: negative, or beyond every machine.
    """
    return at_most(LARGEST_ROWS, name, size(name, value))


def round_up(rows: int, multiple: int = ROW_MULTIPLE) -> int:
    """The smallest multiple of ``multiple`` that is at least ``rows``."""
    return -(-rows // multiple) * multiple


def _fill(table: Tensor, inv_freq: Tensor, attention_scaling: float) -> None:
    """Write every row of ``table [rows, R]`` by the phase rule, on the device of the table.

    float32 frequencies: the phase is the exact product, rounded once to float32. float64: it is not
    rounded. cos and sin are float64, times float32(attention_scaling), rounded once to float32.
    See NOTE [One cosine].
    """
    half = table.shape[1] // 2
    if half == 0 or table.device.type == "meta":
        return
    if table.device.type not in ("cpu", "cuda"):  # no float64 there, as on mps
        staged = torch.empty(table.shape, dtype=torch.float32, device="cpu")
        _fill(staged, inv_freq.to("cpu"), attention_scaling)
        table.copy_(staged)
        return
    frequencies = inv_freq.to(torch.float64)
    magnitude = torch.tensor(attention_scaling, dtype=torch.float32, device=table.device).double()
    rows = max(_BLOCK_ELEMENTS // half, 1)
    for start in range(0, table.shape[0], rows):
        block = table[start : start + rows]
        end = start + block.shape[0]
        positions = torch.arange(start, end, dtype=torch.float64, device=table.device)
        phase = positions.unsqueeze(1) * frequencies
        if inv_freq.dtype == torch.float32:
            phase = phase.to(torch.float32).to(torch.float64)
        wave = torch.polar(magnitude.expand_as(phase), phase)
        block[:, :half].copy_(wave.real)
        block[:, half:].copy_(wave.imag)
    if table.device.type == "cuda":
        # Readers on other streams see the finished rows.
        torch.cuda.current_stream(table.device).synchronize()


def mark_static(tensor: Tensor) -> None:
    """``torch._dynamo.mark_static_address(tensor, guard=True)``, without importing Dynamo for it.

    Code compiled from then on reads the tensor where it lies: CUDA graphs of Inductor do not copy
    it at every replay, and code that got it as an argument recompiles for another one. Where it
    comes with its module, Dynamo replaces the mark by its own, without the guard: the code then
    reads the module at every call, and CUDA graphs record again for another address.
    """
    # The attribute that the function sets (torch 2.11 to 2.14); importing Dynamo takes 1.5 s, which
    # eager captures need not spend. tests/test_cuda_graphs.py fails when it moves.
    tensor._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]


class _Print(NamedTuple):
    """What a filled buffer looked like: enough to recognise it, and to say what happened to it."""

    tensor: weakref.ReferenceType[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    address: int


def _fingerprint(tensor: Tensor) -> _Print:
    return _Print(weakref.ref(tensor), tensor.shape, tensor.dtype, tensor.data_ptr())


class RopeTable(nn.Module):
    """cos and sin of every position below ``capacity``, for one config on one device.

    Buffers, neither of them persistent:

    * ``cos_sin_cache``: float32 ``[capacity, rotary_dim]``, cos half then sin half, times
      ``config.attention_scaling``.
    * ``inv_freq``: ``[rotary_dim / 2]`` of ``config.phase_dtype``; positions outside the table are
      computed from it.

    ``.to()``, ``.half()``, ``.to_empty()`` and the like leave a table as it is: its dtype is fixed,
    and moving it is the business of the module that holds it. From `reserve` on, shape and address
    stay the same until a larger `reserve`. A copy or a pickle is a new table of equal rows.

    Args:
        config: which rotation.
        device: where; None means the default device. On meta the buffers are meta tensors.
        capacity: rows beyond ``config.max_position`` to start with; rounded up to 128.

    Raises:
        TypeError, ValueError: ``device`` or ``capacity``. RuntimeError: the current CUDA stream is
        capturing.
    """

    cos_sin_cache: Tensor
    inv_freq: Tensor

    def __init__(
        self,
        config: RopeConfig,
        device: torch.device | str | int | None = None,
        capacity: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.device = canonical_device(device)
        self._lock = threading.RLock()
        self._frozen = 0
        self._static = False
        self._prints: dict[str, _Print] = {}
        self._pinned: list[Tensor] = []
        self.register_buffer("cos_sin_cache", None, persistent=False)
        self.register_buffer("inv_freq", None, persistent=False)
        self._refuse_in_capture("be built")
        self._publish(round_up(max(row_count("capacity", capacity), config.max_position)))

    @property
    def capacity(self) -> int:
        """Rows of the table, a multiple of 128."""
        return self._prints["cos_sin_cache"].shape[0]

    def reserve(self, rows: int) -> bool:
        """Make ``capacity`` at least ``rows``; True if the table had to be reallocated.

        The larger table is filled first and then published by one assignment, so concurrent readers
        see the old or the new one, each complete and right. Rows that both have are equal bit for
        bit. A dead table is replaced by a live one. Within the capacity nothing happens.

        Raises:
            RuntimeError: it would have to reallocate while compiling, while the current CUDA stream
            captures, or inside ``capture_guard``. TypeError, ValueError: ``rows``.
        """
        needed = round_up(row_count("rows", rows))
        # Dynamo can trace neither locks nor liveness, and need not: the table is an input there.
        if torch.compiler.is_compiling():
            if needed > self.capacity:
                raise RuntimeError(self._refusal("grow", needed, "while compiling"))
            return False
        return self._reserve(needed)

    @_eagerly
    def _reserve(self, needed: int) -> bool:
        with self._lock:
            capacity = self.capacity
            if needed <= capacity and self.dead() is None:
                return False
            self._refuse_in_capture("grow", needed)
            if self._frozen:
                raise RuntimeError(self._refusal("grow", needed, "inside capture_guard"))
            # Not dropped before the device is idle: kernels in flight may read the old rows.
            retired = self._buffers["cos_sin_cache"]
            self._publish(max(needed, capacity))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            del retired
        return True

    def rebuild_(self) -> None:
        """Refill both buffers where they are, after sleep mode, offload or corruption.

        Smaller tables that captured graphs still read are refilled too; see `pin`.

        Lost contents cannot be seen from outside: memory that was discarded and given back looks
        alive. Call this when it may have happened.

        Raises:
            RuntimeError: the table is dead (there is nothing to refill), or this is called while
            compiling or capturing.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(self._refusal("be refilled", self.capacity, "while compiling"))
        self._rebuild()

    @_eagerly
    def _rebuild(self) -> None:
        self._refuse_in_capture("be refilled")
        with self._lock, plain_tensors():
            reason = self.dead()
            if reason is not None:
                raise RuntimeError(
                    f"{self} must be alive to be refilled in place, got a dead table: {reason}; "
                    f"call reserve({self.capacity}) to allocate it again"
                )
            if self.device == _META:
                return
            frequencies = self.config.inv_freq(self.config.phase_dtype).to(self.device)
            tensors = {id(x): x for x in (*self.buffers(), *self._pinned)}.values()
            for x in tensors:
                if x.untyped_storage().nbytes() == 0:
                    continue  # an older one, taken away for good
                if x.dim() == 1:
                    x.copy_(frequencies)
                else:
                    _fill(x, frequencies, self.config.attention_scaling)

    def dead(self) -> str | None:
        """What killed this table, or None while it is alive.

        Sees every change of a buffer's identity, type, device, dtype, shape or address: a move to
        meta, freed storage, a fake, functional or inference tensor put in its place. It cannot see
        memory that was overwritten in place; see `rebuild_`.
        """
        buffers, prints = self._buffers, self._prints
        for name in ("cos_sin_cache", "inv_freq"):
            tensor, known = buffers.get(name), prints[name]
            if (
                tensor is None
                or tensor is not known.tensor()
                or type(tensor) is not Tensor
                or tensor.device != self.device
                or tensor.dtype is not known.dtype
                or tensor.shape != known.shape
                or tensor.data_ptr() != known.address
            ):
                with self._lock:  # not in the middle of a growth
                    return self._diagnose()
        return None

    def _diagnose(self) -> str | None:
        for name in ("cos_sin_cache", "inv_freq"):
            reason = self._loss(self._buffers.get(name), self._prints[name])
            if reason is not None:
                return f"{name} {reason}"
        return None

    def _loss(self, tensor: Tensor | None, known: _Print) -> str | None:
        if not isinstance(tensor, Tensor):
            return "was removed"
        if type(tensor) is not Tensor:
            return f"is a {type(tensor).__name__}"
        if torch._is_functional_tensor(tensor):
            return "is a functional tensor"
        if tensor.device != self.device:
            return f"is on {tensor.device} instead of {self.device}"
        if tensor.is_inference():
            return "is an inference tensor"
        if tensor.dtype != known.dtype:
            return f"is {tensor.dtype} instead of {known.dtype}"
        if tensor.shape != known.shape:
            return f"has shape {tuple(tensor.shape)} instead of {tuple(known.shape)}"
        if tensor.numel() and self.device != _META and not tensor.untyped_storage().nbytes():
            return "has lost its storage"
        if tensor is not known.tensor():
            return "was replaced by another tensor"
        if tensor.data_ptr() != known.address:
            return "was moved to another storage"
        return None

    def pin(self) -> tuple[Tensor, Tensor]:
        """Keep the present storage alive as long as this table, whatever `reserve` does later.

        A captured graph holds addresses, not references. Code compiled from now on takes the
        buffers for static, see `mark_static`, and recompiles for others. Returns the two buffers.
        """
        with self._lock:
            self._stay()
            pinned = (self.cos_sin_cache, self.inv_freq)
            for tensor in pinned:
                if not any(tensor is other for other in self._pinned):
                    self._pinned.append(tensor)
            return pinned

    def freeze(self) -> None:
        """Refuse to grow until `thaw`; nests. Compiled code takes the buffers for static."""
        with self._lock:
            self._frozen += 1
            self._stay()

    def thaw(self) -> None:
        """Undo one `freeze`."""
        with self._lock:
            self._frozen -= 1

    def _stay(self) -> None:
        """Static buffers, those of a later growth too."""
        self._static = True
        for tensor in (self.cos_sin_cache, self.inv_freq):
            mark_static(tensor)

    @_eagerly
    def _publish(self, capacity: int) -> None:
        """Allocate and fill ``capacity`` rows, then let readers see them."""
        config, device = self.config, self.device
        with plain_tensors(), making_on(device):
            # Filled from the config, not from the buffer, which may have been overwritten.
            frequencies = config.inv_freq(config.phase_dtype).to(device)
            table = torch.empty(capacity, config.rotary_dim, dtype=torch.float32, device=device)
            _fill(table, frequencies, config.attention_scaling)
        inv_freq = self._buffers["inv_freq"]
        if inv_freq is None or self._loss(inv_freq, self._prints["inv_freq"]) is not None:
            inv_freq = frequencies
        if self._static:
            mark_static(table)
            mark_static(inv_freq)
        prints = {"cos_sin_cache": _fingerprint(table), "inv_freq": _fingerprint(inv_freq)}
        self._buffers["inv_freq"] = inv_freq
        self._buffers["cos_sin_cache"] = table
        self._prints = prints

    def _refuse_in_capture(self, action: str, rows: int = 0) -> None:
        if stream_is_capturing():
            where = "while the current CUDA stream captures a graph"
            raise RuntimeError(self._refusal(action, rows, where))

    def _refusal(self, action: str, rows: int, where: str) -> str:
        size = f" to {rows} rows" if action == "grow" else ""
        has = f", it has {self.capacity}" if size else ""
        return (
            f"{self} must not {action}{size} {where}{has}; call reserve() or prepare_for_capture() "
            "before compile and capture (positions outside the table are right all the same)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RopeTable:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.config, device_probe(self.device), self.capacity)

    def __repr__(self) -> str:
        return f"RopeTable({self.extra_repr()})"

    def extra_repr(self) -> str:
        config = self.config
        rows = f"{self.capacity} rows, " if self.__dict__.get("_prints") else ""
        return f"{rows}rotary_dim={config.rotary_dim}, base={config.base:g}, device={self.device}"


def device_probe(device: torch.device) -> Tensor:
    """An empty tensor that carries a device through a pickle, where ``map_location`` moves it."""
    with plain_tensors():
        return torch.empty(0, dtype=torch.float32, device=device)


def _restore(config: RopeConfig, probe: Tensor, capacity: int) -> RopeTable:
    return RopeTable(config, probe.device, capacity)
