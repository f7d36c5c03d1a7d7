"""The checks of arguments: what each lets through unchanged, and what an error says it got.

Their sentences, one for each public argument, are in test_errors.py.
"""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rope_compile import checks

# --------------------------------------------------------------------------------- what came


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (2**64 - 1, "18446744073709551615"),
        (-(2**64), "an int of 65 bits"),
        # Python refuses to print its digits, in pytest's name of the case too.
        pytest.param(10**5000, "an int of 16610 bits", id="huge"),
        ("x", "'x'"),
        ("x" * 300, "a str"),
        ([1.0] * 4, "[1.0, 1.0, 1.0, 1.0]"),
        (np.zeros((20, 20)), "a ndarray"),
        (torch.zeros(2, 3), "a tensor of shape (2, 3) on cpu"),
        (torch.zeros(2, device="meta"), "a tensor of shape (2,) on meta"),
    ],
)
def test_what_came_is_one_short_line(value: object, text: str) -> None:
    assert checks.shown(value) == text


def test_no_tensor_is_read_to_be_shown() -> None:
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    assert checks.shown(freed) == "a tensor of shape (4,) on cpu"
    with FakeTensorMode():
        assert checks.shown(torch.ones(4)) == "a tensor of shape (4,) on cpu"


# --------------------------------------------------------------------------------- numbers


def test_numbers_come_from_arrays_tensors_and_strings() -> None:
    for value in (2, 2.0, "2", np.float32(2), np.array(2), torch.tensor(2), torch.tensor(2.0)):
        assert checks.number("x", value) == 2.0
        assert type(checks.number("x", value)) is float
    for value in (Fraction(2), torch.tensor(2.0, device="meta"), torch.ones(1), np.bool_(True)):
        with pytest.raises(TypeError, match="x must be a number, got "):
            checks.number("x", value)


def test_integers_come_from_lists_arrays_and_tensors() -> None:
    for values in ([2, 0], (2.0, 0), np.array([2, 0]), torch.tensor([2, 0])):
        found = checks.integers("x", values)
        assert found == (2, 0)
        assert [type(n) for n in found] == [int, int]
    assert checks.integers("x", []) == ()
    for values in ({2: 0}, {2, 0}, range(2), iter([2, 0]), [2, 0.5], [[2], [0]], torch.tensor(2)):
        with pytest.raises(TypeError, match="x must be a list of integers, got "):
            checks.integers("x", values)


def test_sizes_are_not_converted() -> None:
    assert checks.size("x", 0) == 0
    for value in (np.int64(2), 2.0, "2", torch.tensor(2), False):
        with pytest.raises(TypeError, match="x must be an int, got "):
            checks.size("x", value)


def test_sizes_may_be_symbols() -> None:
    """Backed ones while torch traces, and ones without a value in a compiled function."""
    seen = []

    def sized(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(x.shape[0]))
        return torch.arange(checks.size("x", x.shape[0]))

    traced = make_fx(sized, tracing_mode="symbolic")(torch.ones(5))
    assert seen == [torch.SymInt]
    assert traced(torch.ones(7)).shape == (7,)

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(checks.size("x", x.item()))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(read, backend="eager", fullgraph=True)
        assert [compiled(torch.tensor(n)).shape[0] for n in (3, 0, 5)] == [3, 0, 5]


# --------------------------------------------------------------------------------- reading


def test_values_are_read_where_nothing_waits_or_traces() -> None:
    """The private questions of torch that `readable` asks: each answers no in its own case."""
    x, seen = torch.arange(3), {}

    def ask(name: str):
        def asked(y: torch.Tensor) -> torch.Tensor:
            seen[name] = checks.readable(y)
            return y + 1

        return asked

    assert checks.readable(x)
    assert not checks.readable(x.to("meta"))
    with FakeTensorMode() as mode:
        assert not checks.readable(mode.from_tensor(x))
        assert not checks.readable(x)
    torch.vmap(ask("vmap"))(x)
    torch.func.functionalize(ask("functionalize"))(x)
    torch.func.grad(lambda y: ask("grad")(y).sum())(x.float())
    for tracing in ("real", "fake", "symbolic"):
        make_fx(ask(tracing), tracing_mode=tracing)(x)
    torch.compile(ask("compile"), backend="eager")(x)
    names = ("vmap", "functionalize", "grad", "real", "fake", "symbolic", "compile")
    assert seen == dict.fromkeys(names, False)


# --------------------------------------------------------------------------------- devices


def test_devices_that_exist_are_taken() -> None:
    for value in ("cpu", torch.device("cpu"), "cpu:0", "meta"):
        assert checks.device_of(value) == torch.device(value)
        with checks.making_on(checks.device_of(value)):
            torch.empty(1, device=value)


def test_other_errors_than_a_missing_device_stay_what_they_are() -> None:
    """Out of memory on a device that is there, or where no device was named."""
    for device in (torch.device("cpu"), None):
        with pytest.raises(RuntimeError, match=r"^no memory$"), checks.making_on(device):
            raise RuntimeError("no memory")


def test_a_device_is_missing_by_its_number_or_its_kind() -> None:
    """Asked of torch.accelerator, so a machine with two of a kind is one with two of a kind."""
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
        mock.patch("torch.accelerator.device_count", return_value=2),
    ):
        for name, there in (("cuda:1", True), ("cuda", True), ("cuda:2", False), ("xpu", False)):
            error = RuntimeError if there else ValueError
            with pytest.raises(error) as caught, checks.making_on(torch.device(name)):
                raise RuntimeError("failed")
            assert ("got '" + name in str(caught.value)) is not there
            assert there or isinstance(caught.value.__cause__, RuntimeError)
