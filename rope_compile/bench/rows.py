"""Results as rows, one for each number, and the CSV file that keeps them."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import platform
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import rope_compile as rc

__all__ = [
    "COLUMNS",
    "Row",
    "Run",
    "append",
    "check_header",
    "last_run",
    "read",
    "read_text",
    "text",
]

Number = float | None


@dataclass(frozen=True)
class Row:
    """One number and everything that says what it is; the fields are the columns of the CSV.

    ``y_*`` are in ``unit``: median, 20th and 80th percentile over the rounds. ``ratio`` is how many
    times faster (for other metrics than time: smaller) this is than ``ratio_to`` in the same
    rounds, ``ratio_low`` to ``ratio_high`` the 95 % interval of that median. Rows of one ``run_id``
    may be divided by each other, no others.
    """

    kernel: str = "rope"
    provider: str = ""
    mode: str = "forward"
    metric: str = "time"
    unit: str = "us"
    x: Number = None
    y_50: Number = None
    y_20: Number = None
    y_80: Number = None
    device: str = ""
    timestamp: str = ""
    version: str = ""
    run_id: str = ""
    shape: str = ""
    tokens: Number = None
    q_heads: Number = None
    k_heads: Number = None
    head_dim: Number = None
    rotary_dim: Number = None
    style: str = ""
    layout: str = ""
    dtype: str = ""
    form: str = ""
    positions: str = ""
    cache: str = ""
    threads: Number = None
    bytes: Number = None
    gb_per_s: Number = None
    copy_gb_per_s: Number = None
    share_of_copy: Number = None
    ratio_to: str = ""
    ratio: Number = None
    ratio_low: Number = None
    ratio_high: Number = None
    rounds: Number = None
    torch: str = ""
    triton: str = ""
    note: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_NUMBERS = {field.name for field in dataclasses.fields(Row) if field.type == "Number"}


@dataclass(frozen=True)
class Run:
    """What all rows of one run share."""

    device: str
    timestamp: str
    run_id: str

    @classmethod
    def start(cls, device: torch.device) -> Run:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        run_id = f"{now[:10].replace('-', '')}-{secrets.token_hex(3)}"
        return cls(_device_name(device), now, run_id)

    def row(self, row: Row) -> Row:
        """The row with the columns of the run filled in."""
        return dataclasses.replace(
            row,
            device=self.device,
            timestamp=self.timestamp,
            run_id=self.run_id,
            version=rc.__version__,
            torch=torch.__version__,
            triton=_triton_version(),
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu: {name}, {capability}"


def _triton_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def text(rows: Iterable[Row], *, header: bool = True) -> str:
    """The rows as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if header:
        writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_written(getattr(row, name)) for name in COLUMNS])
    return stream.getvalue()


def _written(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a CSV file, which gets the header where it is new.

    Raises:
        ValueError: the file has other columns.
    """
    is_new = check_header(path)
    with open(path, "a", encoding="utf-8", newline="") as file:
        file.write(text(rows, header=is_new))


def check_header(path: Path) -> bool:
    """Refuse a file of something else; True where there is none yet, or an empty one.

    Raises:
        ValueError: the file has other columns. OSError: it cannot be read.
    """
    if not path.exists():
        return True
    with open(path, encoding="utf-8", newline="") as file:
        first = next(csv.reader(file), None)
    if first is None:
        return True
    if tuple(first) != COLUMNS:
        raise ValueError(
            f"{path} must have the {len(COLUMNS)} columns of this benchmark in its first line, got "
            f"{len(first)}; write to another file"
        )
    return False


def read(path: Path) -> list[Row]:
    """Every row of a CSV file.

    Raises:
        ValueError: the file has other columns. OSError: it cannot be read.
    """
    content = path.read_text(encoding="utf-8")
    check_header(path)
    return read_text(content)


def read_text(content: str) -> list[Row]:
    return [_row(line) for line in csv.DictReader(io.StringIO(content))]


def _row(line: dict[str, str]) -> Row:
    values: dict[str, object] = dict(line)
    for name in _NUMBERS:
        values[name] = float(line[name]) if line[name] else None
    return Row(**values)  # type: ignore[arg-type]  # the header was compared with the fields


def last_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of the run that was appended last."""
    return [row for row in rows if row.run_id == rows[-1].run_id] if rows else []
