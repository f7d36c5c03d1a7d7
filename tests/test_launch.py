"""The eager launch, up to the driver: Triton's own argument binder, on a machine without a GPU.

`tests/test_ptx.py` compiles from a signature it writes itself; here Triton derives it from what the
launcher really passes, packed axis maps included, and its cache says how many binaries that makes.
"""

from __future__ import annotations

from support import run_child

BIND = """
import torch
from triton.runtime import driver
from inductor_text import StandInDriver

class Streams(StandInDriver):
    def get_current_stream(self, device=None):
        return 0

driver.set_active(Streams())
from rope_compile.kernels import triton_rope

def launch(tokens, axes=(), scaling=1.0, padding=0):
    def heads(n):
        x = torch.empty(1, tokens, n, 128 + padding, dtype=torch.bfloat16, device="meta")
        return x[..., :128]
    pairs = [(torch.empty(1, tokens, n, 128, device="meta"), heads(n)) for n in (32, 8)]
    lead = (max(axes) + 1,) if axes else ()
    at = torch.empty(*lead, 1, tokens, dtype=torch.int64, device="meta")
    table, inv_freq = torch.empty(4096, 128, device="meta"), torch.empty(64, device="meta")
    grid, arguments = triton_rope.launch_arguments(
        pairs, at, table, inv_freq, axes, "half", 0, scaling, False
    )
    triton_rope.rope_kernel.warmup(grid=grid, **arguments)
    return len(next(iter(triton_rope.rope_kernel.device_caches.values()))[0])

print([launch(tokens) for tokens in (1, 3, 16, 17, 62, 65, 4096, 100_000)])
print(launch(4096, scaling=1.25), launch(4096, padding=8), launch(4096, padding=4))
print(launch(4096, axes=(0, 1, 2) * 20 + (0, 1, 2, 15)))
"""


def test_triton_binds_what_the_launcher_passes() -> None:
    """Two binaries over all token counts; scaling and strides share them; each map has its own."""
    by_tokens, by_layout, by_axes = run_child("-c", BIND).strip().splitlines()
    assert by_tokens == "[1, 1, 1, 1, 1, 2, 2, 2]"
    # A scaling or a padded row changes nothing; strides that are no multiple of 8 elements do.
    assert by_layout == "2 2 3"
    assert by_axes == "4"
