"""Checks of arguments, one for each kind of value.

Each gives the checked value back, or raises one sentence: ``<name> must be ..., got ...``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# Far beyond every model; products and quotients of a few such numbers are finite in float64, and
# float32 holds each.
LARGEST = 1e30
# Beyond every machine; the bytes of a float32 table of both still fit in 64 bits.
LARGEST_WIDTH = 2**20
LARGEST_ROWS = 2**40


def shown(value: object) -> str:
    """What an error says it got: one short line, without reading a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"a {type(value).__name__}"


def listed(value: object) -> object:
    """An array or a tensor as a list (or number); anything else, and a meta tensor, as it is."""
    tolist = getattr(value, "tolist", None)
    readable = callable(tolist) and not (isinstance(value, Tensor) and value.is_meta)
    return tolist() if readable and tolist is not None else value


def number(name: str, value: object) -> float:
    """A float from an int, float, numeric string, NumPy scalar or 0-d tensor.

    Raises:
        TypeError: anything else, bool included. ValueError: NaN, infinity, a string that is no
        number, or a size that float32 formulas cannot hold.
    """
    plain = listed(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float | str):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        result = float(plain)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, got {shown(plain)}") from error
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {plain!r}")
    if result and not 1 / LARGEST <= abs(result) <= LARGEST:
        raise ValueError(f"{name} must be 0 or of a size between 1e-30 and 1e30, got {plain!r}")
    return result


def positive(name: str, value: object) -> float:
    """As `number`, and larger than 0."""
    result = number(name, value)
    if result <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return result


def non_negative(name: str, value: object) -> float:
    """As `number`, and at least 0."""
    result = number(name, value)
    if result < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return result


def integer(name: str, value: object) -> int:
    """As `number`, with an integral value; exact for ints beyond 2**53."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 63:
            raise ValueError(f"{name} must fit in 64 bits, got {value.bit_length()} bits")
        return value
    result = number(name, value)
    if not result.is_integer():
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return int(result)


def count(name: str, value: object) -> int:
    """As `integer`, and at least 1."""
    result = integer(name, value)
    if result < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return result


def channels(name: str, value: object) -> int:
    """As `count`, and no more than a head can have."""
    return at_most(LARGEST_WIDTH, name, count(name, value))


def integers(name: str, values: object, kind: str = "list of integers") -> tuple[int, ...]:
    """A list, tuple, array or tensor of integral numbers; anything else is a TypeError."""
    plain = listed(values)
    if not isinstance(plain, list | tuple) or not all(map(_integral, plain)):
        raise TypeError(f"{name} must be a {kind}, got {shown(values)}")
    return tuple(int(value) for value in plain)


def _integral(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def flag(name: str, value: object) -> bool:
    """A bool; anything else, 0 and 1 included, is a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def dictionary(name: str, value: object) -> Mapping[str, object]:
    """A mapping from strings, an empty one for None; anything else is a TypeError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary or None, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} must have strings for keys, got {shown(key)}")
    return value


def whole(name: str, value: object) -> int:
    """An int, or a symbol of one while tracing; nothing is converted, so all else is a
    TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    return value  # type: ignore[return-value]


def size(name: str, value: object) -> int:
    """As `whole`, and not negative; symbols are left to torch, since not all can be compared."""
    result = whole(name, value)
    if type(result) is int and not torch.compiler.is_compiling() and result < 0:
        raise ValueError(f"{name} must not be negative, got {shown(result)}")
    return result


def at_most(largest: int, name: str, value: int) -> int:
    """Refuse a number beyond ``largest``."""
    if value > largest:
        raise ValueError(f"{name} must be at most {largest}, got {shown(value)}")
    return value


def tensor(name: str, value: object, kind: str = "a tensor") -> Tensor:
    """A tensor; ``kind`` says which, where an error would."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    return value


def readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now, without waiting for a device.

    Not those of a fake tensor, nor of any while something traces or maps the calls.
    """
    if type(x) is not Tensor or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # Private (torch 2.11 to 2.14); tests/test_checks.py fails when one of them moves.
    return not (torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())


# ---- devices


def device_of(value: torch.device | str | int) -> torch.device:
    """A device from its name or number.

    Raises:
        TypeError: a value of another type. ValueError: no such name, or no such number here.
    """
    if isinstance(value, int) and value > torch.iinfo(torch.int8).max:  # torch would wrap it
        raise ValueError(_no_device(value))
    try:
        return torch.device(value)
    except TypeError as error:
        raise TypeError(_no_device(value)) from error
    except RuntimeError as error:
        raise ValueError(_no_device(value)) from error


@contextlib.contextmanager
def making_on(device: torch.device | None) -> Iterator[None]:
    """Around making a tensor: where it fails for want of the device, a ValueError says so."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if device is None or _exists(device):
            raise
        raise ValueError(_no_device(str(device))) from error


def _exists(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    own = torch.accelerator.current_accelerator()
    if own is None or own.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def _no_device(value: object) -> str:
    return (
        "device must be a torch.device that this machine has, its name or number, or None, got "
        f"{shown(value)}"
    )
