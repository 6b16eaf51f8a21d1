"""`overture profile`: measure the model on this machine, and print the result."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from gateway.errors import StartupError

if TYPE_CHECKING:
    from engine_bridge.settings.profile import (
        AdapterProfile,
        CopyProfile,
        DiskProfile,
        MachineProfile,
        StepProfile,
    )
    from gateway.settings.config import Config

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as shells have it
BAR_CELLS = 24
# Where there is no terminal: a line when another part begins, and so often within one.
LINE_EVERY_S = 15.0


def profile(config: Config, seconds: float, as_json: bool) -> int:
    """Measure, keep the profile, print it; return the process's exit code. Raises StartupError for settings that cannot work."""
    from engine_bridge.driver.engine.building import configure_environment
    from engine_bridge.driver.engine.engine import VllmDriver
    from engine_bridge.driver.engine.fallback import build_with_what_works
    from gateway.app import engine_config

    folder = config.prepare_data_dir() and config.profile_dir
    wanted = engine_config(config)
    # Before anything imports torch: it reads its environment once.
    configure_environment(wanted)
    from engine_bridge.driver.profiling.machine import measure, profiling_config

    with _terminable(), ProgressBar(sys.stderr) as progress:
        try:
            progress.stage("starting the engine")
            wanted = profiling_config(wanted)
            driver, wanted, _ = build_with_what_works(
                wanted,
                None,
                lambda config, _: VllmDriver(config, report=progress.stage),
                needs_adapters=wanted.needs_adapters,
            )
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception as error:
            log.exception("the engine could not be started")
            click.echo(f"error: the engine could not be started: {error}", err=True)
            return EXIT_FAILED
        try:
            measured = measure(driver, wanted, folder, seconds, progress)
            path = measured.save(folder)
        except KeyboardInterrupt:
            progress.clear()
            click.echo("interrupted; nothing was kept", err=True)
            return EXIT_INTERRUPTED
        except (OSError, ValueError) as error:
            raise StartupError(f"the profile could not be made: {error}") from error
        finally:
            driver.close()
    _print(measured)
    click.echo(f"kept in {path}")
    if as_json:
        click.echo(json.dumps(as_line(measured)))
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, so that temporary files are removed."""

    def interrupt(number: int, frame: Any) -> None:
        """Turn the signal into Ctrl-C."""
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressBar:
    """A bar on a terminal, lines elsewhere: the part that is measured, its progress, and the time left."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_live = out.isatty()
        self._part = ""
        self._said_s = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def stage(self, what: str) -> None:
        """Show a stage that has nothing to count yet."""
        if self._is_live:
            self._write(what)
        else:
            self._line(what)

    def __call__(self, what: str, share_done: float, left_s: float) -> None:
        """Show the progress. left_s: the estimated time left, in seconds."""
        now = time.monotonic()
        if self._is_live:
            if now - self._said_s < 0.1:
                return
            self._said_s = now
            num_full = round(share_done * BAR_CELLS)
            bar = "█" * num_full + "░" * (BAR_CELLS - num_full)
            self._write(f"{bar} {left_s:4.0f} s left  {what}")
            return
        part = what.partition(":")[0]
        if part != self._part or now - self._said_s >= LINE_EVERY_S:
            self._part, self._said_s = part, now
            self._line(f"{share_done:4.0%}, {left_s:.0f} s left: {what}")

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self._is_live:
            self._write("")

    def _write(self, text: str) -> None:
        self._out.write(f"\r\x1b[2K{text}")
        self._out.flush()

    def _line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


def as_line(measured: MachineProfile) -> dict[str, Any]:
    """Return the profile as one line of JSON, without the table of step times."""
    fields: dict[str, Any] = msgspec.to_builtins(measured)
    del fields["steps"]["grid"]
    return {"fingerprint": measured.fingerprint, **fields}


def _print(measured: MachineProfile) -> None:
    subject = measured.subject
    threads = f", {subject.num_threads} threads" if subject.num_threads else ""
    click.echo(f"{subject.model} ({subject.dtype}) on {subject.device}{threads}, vLLM {subject.vllm_version}")
    _print_steps(measured.steps)
    if measured.copies is not None:
        _print_copies(measured.copies)
    if measured.disk is not None:
        _print_disk(measured.disk)
    if measured.adapters is not None:
        _print_adapters(measured.adapters)
    for note in measured.notes:
        click.echo(f"note: {note}")


def _print_steps(steps: StepProfile) -> None:
    repeats = "nothing was repeated" if steps.repeatability is None else f"{steps.repeatability:.1%}"
    click.echo(f"\nstep times: {steps.num_samples} steps, {steps.num_held_out} of them held out")
    click.echo(f"  the table's error is {steps.error:.1%}, the machine's own repeatability {repeats}")
    table = steps.table()
    click.echo("  " + ", ".join(_example(table, *work) for work in ((0, 1, 256), (0, 8, 2048), (512, 0, 0))))


def _example(table: Any, num_prefill: int, num_decodes: int, num_context: int) -> str:
    what = (
        f"{num_prefill} prompt tokens" if num_prefill else f"{num_decodes} decoding in {num_context} tokens"
    )
    return f"{what}: {1e3 * table.step_s(num_prefill, num_decodes, num_context):.1f} ms"


def _print_copies(copies: CopyProfile) -> None:
    link, ceiling = copies.link, copies.ceiling_bytes_per_s

    def share(rate: float) -> str:
        """Return a rate's share of a plain copy's, in brackets."""
        return f" ({rate / ceiling:.0%} of a plain copy's {_rate(ceiling)})" if ceiling else ""

    click.echo("\ncopies of KV blocks")
    click.echo(f"  device to host {_rate(link.d2h_bytes_per_s)}{share(link.d2h_bytes_per_s)}")
    click.echo(f"  host to device {_rate(link.h2d_bytes_per_s)}{share(link.h2d_bytes_per_s)}")
    click.echo(
        f"  set-up {1e6 * link.setup_s:.0f} µs; a swap's error is {copies.swap_error:.1%}, "
        f"the machine's repeatability {copies.repeatability:.1%}"
    )


def _print_disk(disk: DiskProfile) -> None:
    past = "past the page cache" if disk.is_direct else "through the page cache"
    click.echo("\ndisk")
    click.echo(f"  writes {_rate(disk.write_bytes_per_s)} ({past}), reads {_rate(disk.read_bytes_per_s)}")


def _print_adapters(adapters: AdapterProfile) -> None:
    click.echo("\nadapters")
    click.echo(f"  loading {_rate(adapters.load_bytes_per_s)}")
    forms = {"requests × largest rank": adapters.bgmv, "sum of ranks": adapters.mbgmv}
    for name, cost in forms.items():
        if cost is not None:
            click.echo(
                f"  a decode step takes {1e6 * cost.a:+.2f} µs × {name} {1e6 * cost.b:+.0f} µs more, R² {cost.r2:.2f}"
            )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
