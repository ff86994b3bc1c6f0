"""`rlx calibrate`: measures what the devices here can do at most."""

from __future__ import annotations

import click

from rlx.backends import BACKENDS, BY_NAME, backend_named, choose_backend
from rlx.cli.options import SecondsRange, json_option
from rlx.cli.show import print_json, table, working
from rlx.cost.kept import ceilings_of

__all__ = ["calibrate"]


@click.command(
    help="""Measure what DEVICEs can do; all that are available by default.

    How fast they move bytes, multiply matrices and start kernels. It is kept in the user's cache folder for this
    machine and these versions; `device="auto"` chooses by it.
    """
)
@click.argument("devices", metavar="[DEVICE]...", nargs=-1, type=click.Choice(list(BACKENDS)))
@click.option("--threads", type=click.IntRange(min=1), help="Of the processor. Default: all that the machine grants.")
@click.option("--seconds", type=SecondsRange(min=0.5, max=60), default=8.0, show_default=True, help="For a device.")
@json_option
def calibrate(devices: tuple[str, ...], threads: int | None, seconds: float, as_json: bool) -> None:
    here = [name for name in BACKENDS if name not in BY_NAME and backend_named(name).available().present]
    made = []
    for name in devices or here:
        choose_backend(name)
        with working(f"calibrating {name}", still=True):
            made.append(ceilings_of(name, threads, renew=True, seconds=seconds))
    if as_json:
        print_json({"ceilings": [c.to_dict() for c in made]})
        return
    rows = [("device", "threads", "Gflop/s", "GB/s near", "GB/s far", "launch", "run", "error")]
    for c in made:
        near, far = max(r for _, r in c.bandwidth), min(r for _, r in c.bandwidth)
        rows.append(
            (
                c.device, str(c.threads), f"{c.flops / 1e9:.1f}", f"{near / 1e9:.1f}", f"{far / 1e9:.1f}",
                f"{c.launch * 1e6:.2f} us", f"{c.run * 1e6:.1f} us", f"{c.error:.0%}",
            )
        )  # fmt: skip
    click.echo(table(rows, right=(1, 2, 3, 4, 5, 6, 7)))
