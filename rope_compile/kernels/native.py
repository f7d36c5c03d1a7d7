"""Builds ``rope_cpu.cpp`` once for this machine and torch, and loads it.

The library lies in a cache folder under a name made of everything its code depends on. A process
that finds it there loads it while the package is imported; the first process that calls the
operator on CPU tensors without finding it compiles it, once for all. Nothing here can fail a call:
where the library cannot be had, the plain-torch path of ``cpu.py`` runs, and `status` says why.

Environment: ``ROPE_COMPILE_NATIVE=0`` never builds nor loads, ``ROPE_COMPILE_CACHE_DIR`` moves the
cache (default ``~/.cache/rope_compile``), ``CXX`` names the compiler (default ``g++``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

log = logging.getLogger("rope_compile")

SOURCE = Path(__file__).with_name("rope_cpu.cpp")
# No contraction: products and sums round apart, as in reference.py, whose bits are the standard.
# No SLP vectoriser: GCC 12's makes fused multiply-adds of complex products all the same.
# OpenMP is compiled in but not linked: torch's own copy, already loaded, answers for it.
COMPILE_FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-tree-slp-vectorize", "-fopenmp", "-fPIC", "-fvisibility=hidden",
)  # fmt: skip
BUILD_TIMEOUT_S = 600


class Unavailable(Exception):
    """Why the native kernel cannot be had; the text goes to the log and to ``doctor``."""


class _State:
    """What this process knows of the library; written under ``LOCK`` alone."""

    loaded = False
    tried = False
    registered = False  # as the kernel of rope and rope_: loaded before anybody could call them
    reason = "no operator has been called on CPU tensors yet"


LOCK = threading.Lock()


def enabled() -> bool:
    """Whether the environment allows the native kernel."""
    return os.environ.get("ROPE_COMPILE_NATIVE", "1") != "0"


def cache_dir() -> Path:
    """Folder of the built libraries; it need not exist."""
    chosen = os.environ.get("ROPE_COMPILE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "rope_compile"


def _processor() -> str:
    """Architecture and instruction sets: -march=native code must not meet a lesser processor."""
    features = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        features = next((x for x in file if x.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {features}"


@functools.cache
def library_path() -> Path:
    """Where the library for this source, torch, compiler command and processor lies."""
    key = hashlib.sha256()
    key.update(SOURCE.read_bytes())
    for part in (
        torch.__version__,
        str(torch.version.git_version),
        os.environ.get("CXX", ""),
        " ".join(COMPILE_FLAGS),
        _processor(),
    ):
        key.update(b"\0" + part.encode())
    return cache_dir() / f"rope_cpu-{key.hexdigest()[:20]}.so"


def load_if_built() -> bool:
    """Load the library and register it as the kernel of both operators, if it has been built.

    Only for the import of the package, when no other thread can be inside the operators.
    """
    if not enabled():
        _State.reason = "ROPE_COMPILE_NATIVE=0 is set"
        return False
    with contextlib.suppress(OSError, RuntimeError), LOCK:
        path = library_path()
        if path.exists():
            _load(path).rope_compile_register()
            _State.registered = True
    return _State.registered


def load_or_build(retry: bool = False) -> bool:
    """Have the library loaded in this process, compiling it first where that is needed.

    Args:
        retry: Compile again what failed to compile before.

    Returns:
        False where it cannot be had, after one line in the log.
    """
    if _State.loaded:
        return True
    with LOCK:
        if not _State.loaded and enabled() and (retry or not _State.tried):
            _State.tried = True
            try:
                _load(build(retry))
            except (Unavailable, OSError, RuntimeError) as error:
                _State.reason = str(error)
                log.warning(
                    "rope_compile: no native CPU kernel (%s); CPU tensors take the slower "
                    "plain-torch path. `rope-compile doctor` says more.",
                    error,
                )
    return _State.loaded


def status() -> tuple[bool, str]:
    """Whether CPU tensors run natively in this process, and one line about it."""
    if not _State.loaded:
        return False, _State.reason
    if _State.registered:
        return True, str(library_path())
    return True, f"{library_path()}, built in this process; the next one calls it more directly"


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    _State.loaded, _State.reason = True, ""
    return library


# ------------------------------------------------------------------------------------------ build


def build(retry: bool = False) -> Path:
    """Compile, check and publish the library, unless somebody has done so.

    Several processes may call this at once: one compiles, the others wait for it. A build that
    failed is not tried again before ``retry``.

    Raises:
        Unavailable: no compiler, a failed build or check, or a cache that cannot be written.
    """
    path = library_path()
    if path.exists():
        return path
    compiler = _compiler()
    failure = path.with_suffix(".log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if path.exists():
                return path
            if failure.exists() and not retry:
                raise Unavailable(f"the build failed before, see {failure}")
            failure.unlink(missing_ok=True)
            log.warning("rope_compile: compiling the native CPU kernel, once for this machine")
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                try:
                    candidate = _compile(compiler, Path(scratch))
                    _check(candidate)
                except Unavailable as error:
                    failure.write_text(f"{error}\n", encoding="utf-8")
                    raise Unavailable(f"{str(error).splitlines()[0]}, see {failure}") from None
                os.replace(candidate, path)  # at once there, or not at all
    except OSError as error:
        raise Unavailable(
            f"the cache {path.parent} cannot be written ({error.strerror or error}); "
            "set ROPE_COMPILE_CACHE_DIR to a folder that can"
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _compiler() -> list[str]:
    if sys.platform != "linux":
        raise Unavailable(f"it is built on Linux only, not on {sys.platform}")
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or shutil.which(command[0]) is None:
        raise Unavailable(
            f"no C++ compiler: {command[0] if command else 'CXX'} was not found; "
            "install g++ or set CXX"
        )
    return command


def _compile(compiler: list[str], scratch: Path) -> Path:
    """Object, then library, in a folder on the cache's own disk."""
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    object_file, library = scratch / "rope_cpu.o", scratch / "rope_cpu.so"
    _run([*compiler, *COMPILE_FLAGS, abi, *includes, "-c", str(SOURCE), "-o", str(object_file)])
    # No -fopenmp here: it would link a second OpenMP runtime next to torch's.
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([*compiler, "-shared", str(object_file), "-o", str(library), *libraries])
    return library


def _check(candidate: Path) -> None:
    """Try the library in a process of its own: one that crashes or is wrong is not loaded here."""
    search = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "ROPE_COMPILE_NATIVE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
    }
    _run([sys.executable, "-m", __name__, str(candidate)], environment)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise Unavailable(
            f"{command[0]} ended with {done.returncode}\n{shlex.join(command)}\n"
            f"{done.stdout}{done.stderr}"
        )


def self_check(path: Path) -> None:
    """Compare a library with the plain-torch path, bit for bit, inside the table.

    Raises:
        AssertionError: they differ.
    """
    ctypes.CDLL(str(path))
    generator = torch.Generator().manual_seed(0)
    ops = torch.ops.rope_compile
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for style in ("half", "interleaved", "interleaved_to_half"):
            table = torch.randn(9, 80, generator=generator)
            q = torch.randn(3, 5, 2, 96, generator=generator).to(dtype)
            k = torch.randn(3, 5, 1, 96, generator=generator).to(dtype)
            positions = torch.randint(0, 9, (3, 5), generator=generator)
            rest = (positions, table, None, (), style, 8, 1.0, False)
            got, wanted = ops.rope_native(q, k, *rest), ops.rope_torch(q, k, *rest)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


if __name__ == "__main__":
    self_check(Path(sys.argv[1]))
