"""Stage "numbers": the kernel's results against float64, and what it may not touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import rope_compile as rc
from bench.gpu_checks import exact
from bench.gpu_checks.registry import Check, Context, NotRun, register
from bench.gpu_checks.variants import GROUPS, ROWS, Variant, edge_positions, speed_variants

CHECKS: list[Check] = []

MANY_TOKENS = 5003  # enough that each program walks 8 heads; no multiple of anything
REPEATED_TOKENS = 65536


def against_float64(context: Context, variants: Sequence[Variant]) -> None:
    """Each variant as a case; its inputs must come out unchanged unless it works in place."""
    for variant in variants:
        with context.case(str(variant)):
            q, k = variant.inputs(context.device)
            before = q.clone(), k.clone()
            at = variant.positions()
            result = variant.call(q, k, at.to(context.device))
            excess = variant.excess(result, before, at)
            if excess > 0:
                context.fail(str(variant), f"{excess:.1e} beyond the error bound of float64")
            elif not variant.in_place and not (
                torch.equal(q, before[0]),
                torch.equal(k, before[1]),
            ):
                context.fail(str(variant), "an input was changed")


def _group(name: str, contract: str) -> None:
    def run(context: Context) -> None:
        against_float64(context, GROUPS[name])

    run.__doc__ = contract
    register(CHECKS, f"numbers.{name}")(run)


for _name, _contract in {
    "widths": "Every style at widths 32 to 192, in place, out of place, inverse, at any position",
    "dtypes": "float16, float32 and float64 as well as bfloat16",
    "partial": "Partial widths, first and last, pass the other channels through",
    "table_only": "Without frequencies a position outside takes the nearest row",
    "axes": "Several axes, in blocks, alternating and over the full width",
    "layouts": "Packed, transposed, unaligned and strided tensors need no copy",
    "phases": "float64 phases, and int32 positions",
}.items():
    _group(_name, _contract)


@register(CHECKS, "numbers.many_tokens")
def many_tokens(context: Context) -> None:
    """Programs that walk several heads, odd token counts, a batch of sequences."""
    tokens = MANY_TOKENS if context.gpu else 61
    for variant in speed_variants(("L8", "GJ")):
        with context.case(f"{variant}, {tokens} tokens"):
            q, k = variant.inputs(context.device, tokens)
            before = q.clone(), k.clone()
            at = torch.randint(-9, 2 * ROWS, (tokens,), generator=torch.Generator().manual_seed(3))
            result = variant.call(q, k, at.to(context.device))
            excess = variant.excess(result, before, at)
            if excess > 0:
                context.fail(str(variant), f"{excess:.1e} beyond the error bound of float64")
    variant = Variant("half", 64)
    with context.case("three sequences equal each alone"):
        q, k = (x.unflatten(0, (3, -1)) for x in variant.inputs(context.device, 3 * 37))
        at = torch.stack([variant.positions().roll(7 * i) for i in range(3)]).to(context.device)
        together = variant.call(q, k, at)
        for i in range(3):
            alone = variant.call(q[i], k[i], at[i])
            expect_equal(context, f"sequence {i}", [x[i] for x in together], alone)


def expect_equal(
    context: Context, label: str, a: Sequence[Tensor | None], b: Sequence[Tensor | None]
) -> None:
    """Bit for bit."""
    for name, x, y in zip(("q", "k"), a, b, strict=True):
        if (x is None) != (y is None) or (x is not None and not same_bits(x, y)):
            context.fail(label, f"{name} differs")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as memory: signed zeros apart, a NaN equal to itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


@register(CHECKS, "numbers.poisoned_outputs")
def poisoned_outputs(context: Context) -> None:
    """Every element of a fresh output is written: its memory held NaN before."""
    reused = 0
    variants = [v for v in (*GROUPS["partial"], *GROUPS["axes"][:4]) if not v.in_place]
    for variant in variants:
        with context.case(str(variant)):
            q, k = variant.inputs(context.device)
            at = variant.positions().to(context.device)
            # Several of each size: the call takes memory for a table first.
            poison = [torch.full_like(x, float("nan")) for x in (q, k) for _ in range(8)]
            places = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in poison]
            del poison
            result = [x for x in variant.call(q, k, at) if x is not None]
            reused += sum(any(x.data_ptr() in place for place in places) for x in result)
            if not all(bool(x.isfinite().all()) for x in result):
                context.fail(str(variant), "an element was not written")
    context.say(f"{reused} of {2 * len(variants)} outputs lay in poisoned memory")
    if context.gpu and not reused:
        context.fail("allocator", "no output lay in poisoned memory, so nothing was shown")


@register(CHECKS, "numbers.guard_bands")
def guard_bands(context: Context) -> None:
    """Nothing outside q and k is read or written, nor outside the table."""
    for variant in (*GROUPS["partial"][:4], *GROUPS["widths"][:5], *GROUPS["table_only"][:2]):
        with context.case(str(variant)):
            inputs = variant.inputs(context.device)
            at = variant.positions().to(context.device)
            views, buffers = zip(*(exact.guarded(x) for x in inputs), strict=True)
            table_view, table_buffer = exact.guarded(variant.rows.to(context.device))
            bare = variant.call(*inputs, at)
            guarded = _with_table(variant, views, at, table_view)
            expect_equal(context, str(variant), bare, guarded)
            for name, view, buffer in zip(("q", "k"), views, buffers, strict=True):
                if exact.touched(view, buffer):
                    context.fail(str(variant), f"memory around {name} was written")
            if exact.touched(table_view, table_buffer):
                context.fail(str(variant), "memory around the table was written")


def _with_table(
    variant: Variant, inputs: Sequence[Tensor], at: Tensor, table: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The call of a variant with another tensor as its table."""
    call = rc.apply_rope_ if variant.in_place else rc.apply_rope
    q, k = inputs
    result = call(
        q,
        k,
        at,
        table,
        inv_freq=variant.inv_freq().to(q.device) if variant.computes else None,
        rotary_offset=variant.offset,
        style=variant.style,
        attention_scaling=variant.scaling,
        inverse=variant.inverse,
        axes=variant.axes or None,
    )
    return result or (q, k)


@register(CHECKS, "numbers.rows_computed")
def rows_computed(context: Context) -> None:
    """A row read and the same row computed agree to 1 float32 ulp of 1."""
    worst = 0.0
    for variant in (Variant("half", 64, dtype=torch.float32), Variant("half", 64, exact=True)):
        with context.case(str(variant)):
            x = torch.zeros(ROWS, 1, 64, dtype=torch.float32, device=context.device)
            x[..., :32] = 1.0  # comes out as cos, then sin
            at = torch.arange(ROWS, device=context.device)
            table = variant.rows.to(context.device)
            read = _with_table(variant, (x, None), at, table)[0]
            computed = _with_table(variant, (x, None), at, table[:0])[0]
            worst = max(worst, exact.ulps_of_1(read, computed))
            if worst > 1:
                context.fail(str(variant), f"{worst:g} ulp apart")
    context.say(f"at most {worst:g} ulp")


@register(CHECKS, "numbers.equals_reference", rehearse=False)
def equals_reference(context: Context) -> None:
    """The GPU's results and the CPU's differ by rounding alone: 1 ulp in 16-bit dtypes."""
    largest: dict[str, int] = {}
    for variant in (*GROUPS["widths"][:12], *GROUPS["dtypes"], *GROUPS["axes"][:6]):
        with context.case(str(variant)):
            at = variant.positions()
            here = variant.call(*variant.inputs("cpu"), at)
            inputs = variant.inputs(context.device)
            there = variant.call(*inputs, at.to(context.device))
            for x, y, source in zip(here, there, variant.inputs("cpu"), strict=True):
                _, larger = variant.expected(source, at)
                if exact.beyond_bound(y, x.double(), larger) > 0:
                    context.fail(str(variant), "more than rounding apart")
                name = str(variant.dtype).removeprefix("torch.")
                largest[name] = max(largest.get(name, 0), exact.ulps(x, y.cpu()))
    context.say("largest: " + ", ".join(f"{n} {steps} ulp" for n, steps in largest.items()))


@register(CHECKS, "numbers.int64_offsets")
def int64_offsets(context: Context) -> None:
    """Elements past 2^31 are reached, and more blocks of tokens than one axis of a grid holds."""
    variant = Variant("half", 64)
    with context.case("a stride past 2^31"):
        far = 2**31 + 16
        memory = _or_not_run(
            lambda: torch.empty(far + 64, dtype=variant.dtype, device=context.device)
        )
        x = memory.as_strided((2, 1, 64), (far, 64, 1))
        source = variant.inputs(context.device, 2)[0][:, :1]
        at = torch.tensor([5, 300])
        in_place = Variant("half", 64, in_place=True)
        for one in (variant, in_place):
            x.copy_(source)
            result = one.call(x, None, at.to(context.device))
            if exact.beyond_bound(result[0], *one.expected(source, at)) > 0:
                context.fail(str(one), "wrong")
        del memory, x
    if not context.gpu:
        context.say("tensors of that size are for a GPU")
        return
    for heads, tokens in (((32, 8), 2**31 // (32 * 128) + 301), ((1, 1), 65535 * 16 + 77)):
        with context.case(f"{tokens} tokens of {heads[0]} heads"):
            _large(context, Variant("half", 128, heads=heads), tokens)
            torch.cuda.empty_cache()


def _or_not_run(allocate: Callable[[], Tensor]) -> Tensor:
    try:
        return allocate()
    except RuntimeError as error:
        raise NotRun(f"no memory for 2^31 elements ({type(error).__name__})") from None


def _large(context: Context, variant: Variant, tokens: int) -> None:
    """First, middle and last tokens of one large call equal a small call on the same values."""
    needed = 2 * tokens * sum(variant.heads) * variant.head_dim * variant.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(context.device)
    if free < needed + 2**31:
        raise NotRun(f"{free / 2**30:.0f} GiB free, {needed / 2**30:.0f} GiB needed")
    q, k = (
        torch.empty(tokens, n, variant.head_dim, dtype=variant.dtype, device=context.device)
        for n in variant.heads
    )
    q.normal_()
    k.normal_()
    at = torch.arange(tokens, device=context.device)
    together = variant.call(q, k, at)
    for start in (0, tokens // 2, tokens - 64):
        part = slice(start, start + 64)
        alone = variant.call(q[part].clone(), k[part].clone(), at[part])
        expect_equal(context, f"tokens from {start}", [x[part] for x in together], alone)


@register(CHECKS, "numbers.zero_tokens")
def zero_tokens(context: Context) -> None:
    """No token and no head launch nothing, and leave no error behind for the next launch."""
    variant = Variant("half", 64)
    at = variant.positions().to(context.device)
    q, k = variant.inputs(context.device)
    for label, empty in (("no tokens", (q[:0], k[:0])), ("no heads", (q[:, :0], k))):
        with context.case(label):
            positions = at[: empty[0].shape[0]]
            for one in (variant, Variant("half", 64, in_place=True)):
                result = one.call(empty[0].clone(), empty[1].clone(), positions)
                if [x.shape for x in result] != [x.shape for x in empty]:
                    context.fail(label, "wrong shapes")
            context.synchronize()
            normal = variant.call(q, k, at)
            if variant.excess(normal, (q, k), at.cpu()) > 0:
                context.fail(label, "the next call is wrong")


@register(CHECKS, "numbers.determinism")
def determinism(context: Context) -> None:
    """Fifty runs give the same bits, and the right ones."""
    tokens = REPEATED_TOKENS if context.gpu else 37
    for variant in (*speed_variants(("L8",))[:1], Variant("interleaved", 64)):
        with context.case(f"{variant}, {tokens} tokens"):
            q, k = variant.inputs(context.device, tokens)
            at = edge_positions().repeat(tokens // 37 + 1)[:tokens].to(context.device)
            first = variant.call(q, k, at)
            for start in (0, tokens // 2, max(tokens - 512, 0)):
                part = slice(start, start + 512)
                some = [x[part] for x in first if x is not None]
                if variant.excess(some, (q[part], k[part]), at[part].cpu()) > 0:
                    context.fail(str(variant), f"the first run is wrong from token {start} on")
            for number in range(49):
                context.before_case()
                again = variant.call(q, k, at)
                if not all(same_bits(a, b) for a, b in zip(first, again, strict=True)):
                    context.fail(str(variant), f"run {number + 2} differs from the first")
                    break


@register(CHECKS, "numbers.wide_heads")
def wide_heads(context: Context) -> None:
    """Heads of 256 and 512 channels, 64 of them and more: many registers, or none would fit."""
    heads = (64, 8) if context.gpu else (6, 2)
    against_float64(
        context,
        [
            Variant(style, width, heads=heads, dtype=dtype)
            for style in ("half", "interleaved")
            for width in (256, 512)
            for dtype in (torch.bfloat16, torch.float32)
        ],
    )


@register(CHECKS, "numbers.rounding")
def rounding(context: Context) -> None:
    """A result halfway between two 16-bit numbers goes to the even one, whatever its sign."""
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        with context.case(str(dtype)):
            cos = 1 + torch.arange(1, 64, 2) * 2.0**-digits  # ties, all of them
            row = torch.cat((cos, torch.zeros(32)))[None].to(context.device)
            x = torch.cat((torch.ones(32), -torch.ones(32)))[None, None].to(context.device, dtype)
            at = torch.zeros(1, dtype=torch.int64, device=context.device)
            out = rc.apply_rope(x, None, at, row)[0].flatten().cpu()
            if not torch.equal(out, torch.cat((cos, -cos)).to(dtype)):
                context.fail(str(dtype), "not rounded to even")


@register(CHECKS, "numbers.selector")
def selector(context: Context) -> None:
    """A choice by token has the bits of the module that was chosen, in and outside the table."""
    ropes = [
        rc.RotaryEmbedding(rc.RopeConfig(head_dim=64, max_position=ROWS, base=base), context.device)
        for base in (1e4, 5e5, 2e4)
    ]
    variant = Variant()
    q, k = variant.inputs(context.device)
    at = variant.positions().to(context.device)
    choice = torch.arange(len(at), device=context.device) % 3
    with context.case("three modules"):
        together = rc.RopeSelector(ropes)(at, q, k, selector=choice)
        for number, rope in enumerate(ropes):
            mine = choice == number
            alone = rope(at[mine], q[mine], k[mine])
            expect_equal(context, f"module {number}", [x[mine] for x in together], alone)


@register(CHECKS, "numbers.tf32")
def tf32(context: Context) -> None:
    """While matrix products may use TF32, positions are exact: 2049 is not 2048."""
    before = torch.get_float32_matmul_precision()
    config = rc.RopeConfig(head_dim=64, max_position=4224)
    torch.set_float32_matmul_precision("high")
    try:
        with context.case("2049 and 4097"):
            rows = rc.RotaryEmbedding(config, context.device).cos_sin_cache.cpu()
            exact_rows = exact.table(4224, config.inv_freq(), 1.0)
            error = (rows - exact_rows)[[2048, 2049, 4096, 4097]].abs().max().item()
            if error > 2.0**-22:
                context.fail("2049 and 4097", f"rows differ by {error:.1e}")
        with context.case("a batch of sequences there"):
            variant = Variant(dtype=torch.float32)
            q, k = (x.unflatten(0, (3, 2)) for x in variant.inputs(context.device, 6))
            at = torch.tensor([2049, 4097]).expand(3, 2)
            result = variant.call(q, k, at.to(context.device))
            if variant.excess(result, (q, k), at) > 0:
                context.fail("a batch of sequences there", "wrong")
    finally:
        torch.set_float32_matmul_precision(before)


@register(CHECKS, "numbers.two_devices", rehearse=False)
def two_devices(context: Context) -> None:
    """Tensors on a second GPU while the first is current; a shared table stays on its own."""
    if torch.cuda.device_count() < 2:
        raise NotRun("one GPU here, two are needed")
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    config, variant = rc.RopeConfig(head_dim=64, max_position=ROWS), Variant()
    with context.case("tensors on the second"), torch.cuda.device(first):
        q, k = variant.inputs(second)
        at = variant.positions()
        if variant.excess(variant.call(q, k, at.to(second)), (q, k), at) > 0:
            context.fail("tensors on the second", "wrong")
    with context.case("a shared module moved"):
        owner = torch.nn.ModuleList([rc.get_rope(config, first)])
        owner.to(second)
        table = rc.get_rope(config, first).cos_sin_cache
        if table.device != first:
            context.fail("a shared module moved", f"the table of {first} is on {table.device}")
