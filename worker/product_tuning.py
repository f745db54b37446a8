"""Times the library's product against our kernels, for `worker.tune`.

A candidate is checked against float64, then timed in a CUDA graph that goes round copies of the
weight, more of them than the L2 cache holds. Most candidates are dropped after a replay or two;
the best few and the library are timed again, in turns.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
import triton
from torch import Tensor

from worker.kernels.products import Scratch, prepare_launch, product
from worker.product_candidates import candidates
from worker.product_shapes import ProductShape
from worker.product_table import Gemv, ProductEntry, ProductTable, Setting, Tiles

_COLD_BYTES = 160 << 20
"""Weights that a graph goes round: several times the L2 cache."""
_SCRATCH_SUMS = 16 << 20
_SCRATCH_TILES = 1 << 16
_MAX_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Largest ‖y − reference‖ / ‖reference‖ of a row."""
_FINALISTS = 4
_MARGIN = 0.98
"""Ours must take less than this share of the library's time to be chosen."""

log = logging.getLogger(__name__)


class WrongResultError(Exception):
    """A candidate computed something else."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of one product at one number of rows, in µs."""

    library: float
    own: float
    setting: Setting | None
    pdl: float
    pdl_setting: Setting | None
    tried: int
    failed: int

    def choice(self, *, may_choose_pdl: bool) -> Setting | None:
        """Return the setting for the table, None for the library."""
        if may_choose_pdl and self.pdl < min(self.own, self.library * _MARGIN):
            return self.pdl_setting
        return self.setting if self.own < self.library * _MARGIN else None


class Checker:
    """Compares products with float64's."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """`x`, [rows, inputs], has the most rows that are checked."""
        offset = None if bias is None else bias.double()
        self._reference = F.linear(x.double(), weight.double(), offset)
        self._bound = _MAX_ERROR[x.dtype]

    def check(self, y: Tensor) -> None:
        """Raise WrongResultError if any of y's rows, those of the first rows of x, is off."""
        reference = self._reference[: len(y)]
        error = (y.double() - reference).norm(dim=1) / reference.norm(dim=1)
        worst = float(error.max())
        if not worst <= self._bound:
            raise WrongResultError(f"a row is off by {worst:.2e}")


class GraphTimer:
    """Times one launch as part of a graph of launches."""

    def __init__(self, num_launches: int) -> None:
        self._num_launches = num_launches

    def capture(self, launch: Callable[[int], object]) -> torch.cuda.CUDAGraph:
        """Return a graph of `launch(i)` for every i."""
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self._num_launches):
                launch(i)
        graph.replay()
        return graph

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the µs of one launch in one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken: float = start.elapsed_time(end)
        return 1000.0 * taken / self._num_launches


class ProductTimer:
    """Times one product of a shape, for any number of rows."""

    def __init__(self, shape: ProductShape, max_rows: int, scratch: Scratch) -> None:
        device, dtype = scratch.sums.device, torch.bfloat16
        self._scratch = scratch
        weight = torch.randn(shape.outputs, shape.inputs, device=device, dtype=dtype)
        weight *= shape.inputs**-0.5
        copies = max(2, -(-_COLD_BYTES // weight.nbytes))
        self._weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        self._x = torch.randn(max_rows, shape.inputs, device=device, dtype=dtype)
        self._checker = Checker(self._x, weight)
        self._timer = GraphTimer(max(copies, 4))

    def library(self, rows: int) -> torch.cuda.CUDAGraph:
        """Return a graph of the library's product."""
        x = self._x[:rows]
        self._checker.check(F.linear(x, self._weights[0]))
        return self._timer.capture(lambda i: F.linear(x, self._weights[i % len(self._weights)]))

    def own(self, rows: int, setting: Setting) -> torch.cuda.CUDAGraph:
        """Return a graph of our product. Raises WrongResultError, or whatever Triton does."""
        x = self._x[:rows]
        out = x.new_full((rows, len(self._weights[0])), torch.nan)
        launches = [
            prepare_launch(x, weight, None, setting, self._scratch, out) for weight in self._weights
        ]

        def launch(i: int) -> None:
            kernel, grid, arguments, options = launches[i % len(launches)]
            kernel[grid](*arguments, **options)

        launch(0)
        self._checker.check(out)
        first = out.clone()
        graph = self._timer.capture(launch)
        if not torch.equal(out, first):
            raise WrongResultError("two runs differ")
        return graph

    def warm(self, rows: int, settings: Iterable[Setting]) -> None:
        """Ask for the kernels of settings to be compiled."""
        x, weight = self._x[:rows], self._weights[0]
        out = x.new_empty(rows, len(weight))
        for setting in settings:
            kernel, grid, arguments, options = prepare_launch(
                x, weight, None, setting, self._scratch, out
            )
            kernel.warmup(*arguments, grid=grid, **options)

    def replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the µs of one product in one replay."""
        return self._timer.replay_us(graph)


class Tuner:
    """Goes through shapes and numbers of rows within a time."""

    def __init__(
        self, device: torch.device, *, seconds: float, may_choose_pdl: bool, no_pdl: bool
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._gpu = properties.name
        self._processors = properties.multi_processor_count
        self._ends = time.monotonic() + seconds
        self._may_choose_pdl = may_choose_pdl
        self._no_pdl = no_pdl
        self._scratch = Scratch.allocate(_SCRATCH_SUMS, _SCRATCH_TILES, device)
        self._entries: dict[tuple[int, int], ProductEntry] = {}
        self._measurements: list[dict[str, object]] = []

    def run(self, shapes: Sequence[ProductShape], rows: Sequence[int], out: Path) -> None:
        """Measure everything there is time for; the table is written after each shape."""
        print(
            f"{self._gpu}: µs of one product in a graph, weights not in the cache\n"
            f"{'product':>10} {'outputs':>8} {'inputs':>6} {'rows':>5} {'linear':>8} {'own':>8} "
            f"{'pdl':>8} {'GB/s':>6}  setting (tried, failed)",
            flush=True,
        )
        with torch.inference_mode():
            for done, shape in enumerate(shapes):
                share = (self._ends - time.monotonic()) / (len(shapes) - done)
                self._run_shape(shape, rows, time.monotonic() + share)
                out.write_text(self._table().to_json(self._measurements))

    def _table(self) -> ProductTable:
        return ProductTable(self._gpu, "bfloat16", dict(self._entries))

    def _run_shape(self, shape: ProductShape, rows: Sequence[int], ends: float) -> None:
        timer = ProductTimer(shape, max(rows), self._scratch)
        settings = {
            count: [
                setting
                for setting in candidates(
                    count, shape.outputs, shape.inputs, processors=self._processors
                )
                if setting_has_room(setting, count, shape)
            ]
            for count in rows
        }
        started = time.monotonic()
        compile_together(timer, settings)
        compiled = time.monotonic() - started
        choices: dict[int, Setting | None] = {}
        for done, count in enumerate(rows):
            if time.monotonic() > ends:
                print(f"no time left for {shape.name} from {count} rows on", flush=True)
                break
            share = (ends - time.monotonic()) / (len(rows) - done)
            timing = self._time(timer, count, settings[count], time.monotonic() + share)
            choices[count] = timing.choice(may_choose_pdl=self._may_choose_pdl)
            self._report(shape, count, timing)
        print(
            f"{shape.name}: {time.monotonic() - started:.1f} s, {compiled:.1f} of them to compile",
            flush=True,
        )
        self._entries[shape.outputs, shape.inputs] = ProductEntry(
            tuple(choices), tuple(choices.values())
        )

    def _time(
        self, timer: ProductTimer, rows: int, settings: Sequence[Setting], ends: float
    ) -> Timing:
        """Return the times of the library and of the best of the settings."""
        library = timer.library(rows)
        screened: list[tuple[float, Setting]] = []
        fastest, tried, failed = float("inf"), 0, 0
        for setting in settings:
            if time.monotonic() > ends:
                break
            tried += 1
            try:
                graph = timer.own(rows, setting)
            except Exception as error:  # noqa: BLE001  # one that cannot run is one less to choose
                failed += 1
                log_failure(setting, error)
                continue
            taken = timer.replay_us(graph)
            if taken < 1.3 * fastest:
                taken = min(taken, timer.replay_us(graph), timer.replay_us(graph))
            fastest = min(fastest, taken)
            screened.append((taken, setting))
        screened.sort(key=lambda pair: pair[0])
        finalists = [setting for _, setting in screened[:_FINALISTS]]
        if not self._no_pdl:
            finalists += [replace(setting, pdl=True) for setting in finalists]
        times: dict[Setting | None, float] = {None: time_again(timer, library)}
        for setting in finalists:
            try:
                times[setting] = time_again(timer, timer.own(rows, setting))
            except Exception as error:  # noqa: BLE001  # as above
                failed += 1
                log_failure(setting, error)
        own, plain = best(times, pdl=False)
        pdl, overlapped = best(times, pdl=True)
        return Timing(times[None], own, plain, pdl, overlapped, tried, failed)

    def _report(self, shape: ProductShape, rows: int, timing: Timing) -> None:
        fastest = min(timing.library, timing.own)
        moved = 2 * (shape.outputs * shape.inputs + rows * (shape.outputs + shape.inputs))
        print(
            f"{shape.name:>10} {shape.outputs:8} {shape.inputs:6} {rows:5} {timing.library:8.2f} "
            f"{timing.own:8.2f} {timing.pdl:8.2f} {moved / fastest / 1000:6.0f}  "
            f"{timing.setting} ({timing.tried}, {timing.failed}) pdl: {timing.pdl_setting}",
            flush=True,
        )
        self._measurements.append(
            {
                "product": shape.name,
                "outputs": shape.outputs,
                "inputs": shape.inputs,
                "rows": rows,
                "library_us": round(timing.library, 2),
                "own_us": round(timing.own, 2) if timing.setting else None,
                "setting": repr(timing.setting),
                "pdl_us": round(timing.pdl, 2) if timing.pdl_setting else None,
                "pdl_setting": repr(timing.pdl_setting),
            }
        )


def time_again(timer: ProductTimer, graph: torch.cuda.CUDAGraph) -> float:
    """Return the median of enough replays."""
    return median(timer.replay_us(graph) for _ in range(15))


def best(times: dict[Setting | None, float], *, pdl: bool) -> tuple[float, Setting | None]:
    """Return our smallest time with or without pdl, infinite if there is none."""
    return min(
        ((us, setting) for setting, us in times.items() if setting and setting.pdl == pdl),
        key=lambda pair: pair[0],
        default=(float("inf"), None),
    )


def setting_has_room(setting: Setting, rows: int, shape: ProductShape) -> bool:
    """Whether the tuner's scratch is large enough."""
    return isinstance(setting, Gemv) or (
        setting.num_sums(rows, shape.outputs) <= _SCRATCH_SUMS
        and setting.num_tiles(rows, shape.outputs) <= _SCRATCH_TILES
    )


def compile_together(timer: ProductTimer, settings: dict[int, list[Setting]]) -> None:
    """Compile all kernels in threads; what fails will fail again when it is launched."""
    try:
        with (
            ThreadPoolExecutor() as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            for rows, some in settings.items():
                timer.warm(rows, some)
    except Exception as error:  # noqa: BLE001  # then each is compiled when it is launched
        print(f"could not compile in threads: {error!r}", file=sys.stderr)


def log_failure(setting: Setting, error: Exception) -> None:
    """Say on stderr what was wrong with a candidate."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    print(f"  {setting}: {type(error).__name__}: {text[:200]}", file=sys.stderr, flush=True)


def check_kernels(device: torch.device) -> int:
    """Check every kind of setting on tiny products, in Triton's interpreter on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    scratch = Scratch.allocate(1 << 16, 64, device)
    settings: tuple[Setting, ...] = (
        Gemv(4, 64, 1),
        Gemv(8, 256, 4),
        Tiles(16, 16, 64, 1, 4, 2),
        Tiles(64, 16, 32, 3, 4, 3),
        Tiles(32, 32, 64, 4, 4, 3),
    )
    if device.type == "cuda":
        settings += tuple(replace(setting, pdl=True) for setting in settings)
    wrong = 0
    for rows, outputs, inputs in ((1, 40, 256), (3, 64, 256), (8, 24, 512), (20, 72, 256)):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        bias = torch.randn(outputs, device=device).to(dtype)
        checker = Checker(x, weight, bias)
        for setting in settings:
            if not setting.fits(rows, outputs, inputs):
                continue
            try:
                checker.check(product(x, weight, bias, setting, scratch))
                verdict = "right"
            except WrongResultError as error:
                verdict, wrong = str(error), wrong + 1
            print(f"{rows:3} x {outputs} x {inputs} {setting}: {verdict}")
    return 1 if wrong else 0
