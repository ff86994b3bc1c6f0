"""rlx side by side with the other runtimes, in one interleaved run.

Every runtime runs each model in a process of its own. Processes are started one after the other, which gives the time
from a fresh process to its first answer; rlx starts twice, with an empty cache and with what that start left there. Its
checkout is given what a wheel has: compiled Python, and the code of tools/prebuild.py. Memory is that of the process
and its children: their proportional set size (what several processes share counts by parts) between runs, and the most
that was resident, less what the others have of it. Then all are stopped, and in each round every one in turn is woken
for a slot, in changing order: an idle runtime takes no time from the one that is measured. A slot in which other
processes were busy is left out where enough are left; the row is marked with `~` where not.

The ratio is the best other runtime's median over ours: above 1, rlx is ahead. Work is counted on rlx's graph of the
model: what its products, convolutions and recurrent cells compute, and the weights that they read once.

`--peers rlx --before CHECKOUT` compares with rlx as it is in another checkout: the ratio is how much faster it became.

With `--busy N` each slot is followed by two beside N processes that only take time: of the same session (one terminal),
and of another (a second terminal, a service); Linux shares processors by sessions first. Two tables say how many times
as long as alone the runs took, by mean, which is what throughput loses and counts stalls, and by median, which hides
them.

usage: python benchmarks/compare.py [--only WORD,...] [--peers NAME,...] [--threads N] [--busy N] [--json FILE] ...
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peaks import Peaks
from peers import PEERS
from workloads import NAMES, ROOT, chosen, ensure

HERE = Path(__file__).resolve().parent
PATIENCE = 600  # seconds that a runtime may take to load and compile
DIRTY = 0.15  # processors that others may use in a slot
BEFORE = "before"  # the name of rlx in another checkout
LOADS = {"same": "of the same session", "other": "of another session"}


def busy_seconds() -> float:
    """Processor time that anything used on this machine since it started."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, float]:
    """MB of a process and its children: `pss` now, and the `peak` of each, less what other processes have of it now."""
    found = {"pss": 0.0, "peak": 0.0}
    for each in tree_of(pid):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()]
            now = {row[0].rstrip(":"): int(row[1]) / 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
            status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            found["pss"] += now["Pss"]
            found["peak"] += int(status["VmHWM"].split()[0]) / 1024 - now["Rss"] + now["Pss"]
    return found


def tree_of(pid: int) -> list[int]:
    """A process and all that it has started and that are still there."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree_of(int(child))
    return found


class Failed(RuntimeError):
    """A runtime gave no answer."""


@dataclass
class Slot:
    """Times of the calls of one slot in seconds; `others` is how many processors other programs used meanwhile."""

    times: list[float]
    others: float


def times_of(slots: Sequence[Slot], allowed: float) -> dict[str, Any]:
    """Figures of the calls of those slots in which others used no more processors than `allowed`, if these are enough.

    `median` is the median over slots of the slot's median; all others are over the calls.
    """
    clean = [s for s in slots if s.others <= allowed]
    enough = len(clean) >= max(3, len(slots) // 3)
    used = clean if enough else slots
    times = sorted(t for s in used for t in s.times)
    return {
        "median": statistics.median(statistics.median(s.times) for s in used),
        "mean": statistics.mean(times),
        "p25": times[len(times) // 4],
        "p90": times[len(times) * 9 // 10],
        "best": times[0],
        "calls": len(times),
        "noisy": not enough,
    }


class Worker:
    """One runtime with one model, in a process that is stopped while others are measured."""

    def __init__(
        self, peer: str, name: str, folder: Path, threads: int, cache: Path | None, checkout: Path = ROOT
    ) -> None:
        self.peer, self.slots = peer, list[Slot]()
        self.loaded = {key: list[Slot]() for key in LOADS}
        command = [sys.executable, str(HERE / "peers.py"), peer, name, str(folder), str(threads)]
        path = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        start = time.time()
        self.process = subprocess.Popen(
            command + ([str(cache)] if cache else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": os.pathsep.join(path),
                **({"XDG_CACHE_HOME": str(cache)} if cache else {}),
            },
            text=True,
            process_group=0,
        )
        self.facts = self.answer()
        self.start_s = self.facts["answered"] - start
        self.signal(signal.SIGSTOP)

    def answer(self) -> dict[str, Any]:
        """The next line of the process."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.end()
            raise Failed("it crashed" if ready else f"no answer in {PATIENCE} s")
        said: dict[str, Any] = json.loads(line)
        if "failure" in said:
            self.end()
            raise Failed(said["failure"])
        return said

    def slot(self, seconds: float, kept: list[Slot]) -> None:
        """Wakes the process for so long and adds what it measured to `kept`."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        busy, start = busy_seconds(), time.perf_counter()
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        said = self.answer()
        self.signal(signal.SIGSTOP)
        others = (busy_seconds() - busy - said["cpu"]) / (time.perf_counter() - start)
        kept.append(Slot(said["times"], others))

    def memory(self) -> dict[str, float]:
        """MB of the process, stopped between runs, and at most."""
        now = memory_of(self.process.pid)
        return {"pss_mb": now["pss"], "peak_mb": now["peak"]}

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """Lets the process come to its own end: what it keeps on disk for the next start is there then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.signal(signal.SIGCONT)
        self.process.wait(PATIENCE)

    def end(self) -> None:
        """Kills the process."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def summary(self, busy: int) -> dict[str, Any]:
        """Times of a run in seconds (`loaded`: those beside `busy` processes), and the other facts."""
        return {
            **times_of(self.slots, DIRTY),
            "loaded": {key: times_of(slots, DIRTY + busy) for key, slots in self.loaded.items() if slots},
            "start_s": self.start_s,
            **self.memory(),
            "error": self.facts["error"],
        }


@dataclass
class Row:
    """What was measured of one workload, by runtime; `flops` and `bytes` are of one run."""

    name: str
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)  # of rlx with an empty cache: start_s, peak_mb, pss_mb
    flops: int = 0
    bytes: int = 0

    @property
    def ours(self) -> dict[str, Any] | None:
        """The figures of rlx."""
        return self.results.get("rlx")

    @property
    def best(self) -> str | None:
        """The fastest other runtime."""
        others = {peer: facts["median"] for peer, facts in self.results.items() if not peer.startswith("rlx")}
        return min(others, key=others.__getitem__) if others else None

    @property
    def ratio(self) -> float | None:
        """How many times as long as rlx the fastest other runtime takes."""
        if self.ours is None or self.best is None:
            return None
        return float(self.results[self.best]["median"] / self.ours["median"])


class Load:
    """Processes that only take time, so many, each tied to a processor of its own from the last one down; stopped but
    within `on()`.
    """

    def __init__(self, count: int, *, apart: bool) -> None:
        code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
        processors = sorted(os.sched_getaffinity(0), reverse=True)[:count]
        command = [sys.executable, "-c", code]
        self.processes = [subprocess.Popen([*command, str(p)], start_new_session=apart) for p in processors]
        time.sleep(0.3 if count else 0)  # to start, and to tie themselves
        self.signal(signal.SIGSTOP)

    @contextmanager
    def on(self) -> Iterator[None]:
        """They run."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Sends all the signal."""
        for process in self.processes:
            process.send_signal(number)


HEAVY = ("matmul", "gemm", "einsum", "conv", "attention", "lstm", "gru", "rnn", "qlinear")


def work_of(path: Path) -> tuple[int, int]:
    """Operations of a run in products, convolutions and recurrent cells; bytes of weights (not tables) and results."""
    from rlx.importers import onnx as importer
    from rlx.ops.base import Op, tensor_bytes

    graph = importer.load(path)
    heavy = [n for n in graph.nodes if any(word in n.op.op_name for word in HEAVY)]
    flops = sum(count(n.op.work(*(v.type for v in n.inputs)).flops) for n in heavy if isinstance(n.op, Op))
    streamed = {v for n in graph.nodes for i, v in enumerate(n.inputs) if not (n.op.op_name == "gather" and i == 0)}
    moved = [v for v in graph.params if v in streamed] + [*graph.inputs, *(o.value for o in graph.outputs)]
    return flops, sum(count(tensor_bytes(v.type)) for v in moved)


def count(size: object) -> int:
    """A static size."""
    assert isinstance(size, int)
    return size


def measure(name: str, peers: Sequence[str], folder: Path, args: argparse.Namespace, loads: dict[str, Load]) -> Row:
    """One workload, all runtimes in turn, and beside each of `loads`."""
    ensure(name, folder)
    row = Row(name)
    with suppress(Exception):  # a model that rlx can't read has no work to show; its row says why
        row.flops, row.bytes = work_of(folder / f"{name}.onnx")
    workers: list[Worker] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for peer in peers:
                if not PEERS[peer].supports(name, folder):
                    continue
                PEERS[peer].make(name, folder)
                ours = peer.startswith("rlx")
                try:
                    if peer == "rlx":  # the first start fills the cache, the second one finds it
                        first = Worker(peer, name, folder, args.threads, Path(scratch))
                        row.cold = {"start_s": first.start_s, **first.memory()}
                        first.finish()
                    if peer == BEFORE:
                        there = (Path(scratch) / BEFORE, args.before.resolve())
                        Worker(peer, name, folder, args.threads, *there).finish()  # fills its cache
                        workers.append(Worker(peer, name, folder, args.threads, *there))
                        continue
                    workers.append(Worker(peer, name, folder, args.threads, Path(scratch) if ours else None))
                except Failed as failure:
                    row.failures[peer] = str(failure)
            begin = time.perf_counter()
            for number in range(args.rounds):
                if number >= 3 and time.perf_counter() - begin > args.limit:
                    break
                turn = number % len(workers) if workers else 0
                for worker in workers[turn:] + workers[:turn]:
                    worker.slot(args.slot, worker.slots)
                    for key, load in loads.items():
                        with load.on():
                            worker.slot(args.slot, worker.loaded[key])
        for worker in workers:
            row.results[worker.peer] = worker.summary(args.busy)
    finally:
        for worker in workers:
            worker.end()
    return row


def prebuild(checkout: Path) -> None:
    """Has the machine code made that comes with the wheel of a checkout; an earlier one had none."""
    tool = checkout / "tools" / "prebuild.py"
    if tool.exists():
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        subprocess.run([sys.executable, str(tool), "--here"], check=True, env=env, stdout=subprocess.DEVNULL)


def present(wanted: Sequence[str]) -> list[str]:
    """The runtimes that are installed; what is missing is said."""
    there = [p for p in wanted if importlib.util.find_spec(PEERS[p].package) is not None]
    for peer in wanted:
        if peer not in there:
            made = PEERS[peer]
            print(f"{peer} is left out: {made.package} is not installed (pip install -e '.[{made.extra}]')")
    return there


def milliseconds(seconds: float) -> str:
    """Three digits or so."""
    value = 1e3 * seconds
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def slowed(facts: dict[str, Any], load: str) -> str:
    """How many times as long as alone its runs took beside the load."""
    loaded = facts["loaded"][load]
    mean, median = (loaded[key] / facts[key] for key in ("mean", "median"))
    return f"{mean:.2f} ({median:.2f})" + ("~" if loaded["noisy"] else "")


def geometric(ratios: Sequence[float]) -> str:
    """Their geometric mean."""
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"


def tables(rows: Sequence[Row], peers: Sequence[str], peaks: dict[str, float]) -> str:
    """The results as Markdown tables."""
    out = ["Median milliseconds of a run", "", "| workload | " + " | ".join(peers) + " | ratio | error |"]
    out.append("|---" * (len(peers) + 3) + "|")
    for row in rows:
        cells = [
            ("**{}**" if peer == row.best else "{}").format(milliseconds(row.results[peer]["median"]))
            + ("~" if row.results[peer]["noisy"] else "")
            if peer in row.results
            else ("failed" if peer in row.failures else "-")
            for peer in peers
        ]
        error = f"{row.ours['error']:.0e}" if row.ours else "-"
        out.append(f"| {row.name} | {' | '.join(cells)} | {f'{row.ratio:.2f}' if row.ratio else '-'} | {error} |")
    ratios = [row.ratio for row in rows if row.ratio]
    if ratios:
        out += ["", f"Geometric mean of the ratios {geometric(ratios)}, least {min(ratios):.2f}."]
    out += ["", f"Share of this machine's peaks ({peaks['gflops']:.0f} GFLOP/s, {peaks['read_gbs']:.1f} GB/s)", ""]
    out += ["| workload | GFLOP | of FMA peak: rlx | best other | MB | of bandwidth: rlx | best other | rlx p25/best |"]
    out += ["|---" * 8 + "|"]
    for row in rows:
        if row.ours is None or row.best is None:
            continue
        pair = (row.ours["median"], row.results[row.best]["median"])
        compute = [f"{row.flops / t / 1e9 / peaks['gflops']:.0%}" for t in pair]
        traffic = [f"{row.bytes / t / 1e9 / peaks['read_gbs']:.0%}" for t in pair]
        spread = row.ours["p25"] / row.ours["best"]
        cells = [f"{row.flops / 1e9:.3f}", *compute, f"{row.bytes / 1e6:.1f}", *traffic, f"{spread:.2f}"]
        out.append(f"| {row.name} | {' | '.join(cells)} |")
    for load, kind in LOADS.items():
        shown = [row for row in rows if any(load in facts["loaded"] for facts in row.results.values())]
        if not shown:
            continue
        out += ["", f"Times as long beside busy processes {kind}: by mean (by median)", ""]
        out += ["| workload | " + " | ".join(peers) + " | ratio then, of means |", "|---" * (len(peers) + 2) + "|"]
        slower: dict[str, list[float]] = {peer: [] for peer in peers}
        for row in shown:
            means = {peer: facts["loaded"][load]["mean"] for peer, facts in row.results.items()}
            for peer, mean in means.items():
                slower[peer].append(mean / row.results[peer]["mean"])
            cells = [slowed(row.results[peer], load) if peer in means else "-" for peer in peers]
            others = [mean for peer, mean in means.items() if not peer.startswith("rlx")]
            cells.append(f"{min(others) / means['rlx']:.2f}" if others and "rlx" in means else "-")
            out.append(f"| {row.name} | {' | '.join(cells)} |")
        out.append(f"| geometric mean | {' | '.join(map(geometric, slower.values()))} | |")
    for title, key, form in (
        ("Seconds from a fresh process to its first answer (rlx: warm cache, and with an empty one)", "start_s", ".2f"),
        ("Peak MB of the process and its children (rlx: warm cache, and with an empty one)", "peak_mb", ".0f"),
        ("MB of the process and its children between runs (the same)", "pss_mb", ".0f"),
    ):
        out += ["", title, "", "| workload | " + " | ".join(peers) + " | rlx, empty cache |"]
        out += ["|---" * (len(peers) + 2) + "|"]
        for row in rows:
            cells = [format(row.results[p][key], form) if p in row.results else "-" for p in peers]
            cells.append(format(row.cold[key], form) if row.cold else "-")
            out.append(f"| {row.name} | {' | '.join(cells)} |")
    for row in rows:
        out += [f"{row.name}, {peer}: {why}" for peer, why in row.failures.items()]
    return "\n".join(out)


def plot(rows: Sequence[Row]) -> str:
    """The ratios as bars, as an SVG picture; the line is where both take the same time."""
    shown = [(row.name, row.ratio, row.best) for row in rows if row.ratio]
    height, left, unit = 22 * len(shown) + 40, 190, 110
    bars = []
    for i, (name, ratio, best) in enumerate(shown):
        y, width = 22 * i + 10, min(ratio, 5) * unit
        colour = "#2a7" if ratio >= 1 else "#c54"
        bars.append(
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.0f}" height="16" fill="{colour}"/>'
            f'<text x="{left + width + 6:.0f}" y="{y + 12}">{ratio:.2f} x {best}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 5 * unit + 130}" height="{height}" '
        f'font-family="sans-serif" font-size="12">{"".join(bars)}'
        f'<path d="M{left + unit} 4V{height - 24}" stroke="#333" stroke-dasharray="3"/>'
        f'<text x="{left + unit}" y="{height - 8}" text-anchor="middle">best other runtime = 1</text></svg>\n'
    )


def main() -> int:
    """Prints the tables; exit status 1 if rlx failed anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only workloads with one of these words (a,b) in their names")
    others = ",".join(peer for peer in PEERS if peer != BEFORE)
    usual = ",".join(peer for peer in others.split(",") if PEERS[peer].precision == "f32")
    parser.add_argument("--peers", default=usual, help=f"of {others}; {usual} by default")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="also rlx as it is in another checkout")
    parser.add_argument("--folder", type=Path, default=ROOT / "models" / "benchmark", help="where the models are made")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=8, help="slots of each runtime")
    parser.add_argument("--slot", type=float, default=0.25, help="seconds of a slot (at least 3 runs)")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a workload gets no more rounds")
    parser.add_argument("--busy", type=int, default=0, help="measure also beside so many processes that only take time")
    parser.add_argument("--json", type=Path, help="also write everything there")
    parser.add_argument("--plot", type=Path, help="also draw the ratios (SVG)")
    args = parser.parse_args()
    unknown = set(args.peers.split(",")) - set(others.split(","))
    if unknown:
        parser.error(f"--peers: unknown {', '.join(sorted(unknown))}")
    if args.before and not (args.before / "rlx" / "__init__.py").is_file():
        parser.error(f"--before: {args.before} is no checkout of rlx")
    names = chosen(parser, args.only, NAMES)

    peers = present([*args.peers.split(","), *([BEFORE] if args.before else [])])
    for checkout in (ROOT, args.before) if args.before else (ROOT,):
        compileall.compile_dir(checkout / "rlx", quiet=1)  # as an installer does for every other package
        prebuild(checkout)
    peaks = Peaks().measure(args.threads)
    rows: list[Row] = []
    loads = {key: Load(args.busy, apart=key == "other") for key in LOADS} if args.busy else {}
    try:
        for name in names:
            rows.append(measure(name, peers, args.folder, args, loads))
            ratio = rows[-1].ratio
            print(f"{name}: {f'{ratio:.2f}' if ratio else rows[-1].failures}", file=sys.stderr, flush=True)
            if args.json:
                facts = [{**vars(r), "ratio": r.ratio, "best": r.best} for r in rows]
                about = {"python": platform.python_version(), "threads": args.threads, "busy": args.busy}
                args.json.write_text(json.dumps({**about, "peaks": peaks, "rows": facts}, indent=1) + "\n")
    finally:
        for load in loads.values():
            load.signal(signal.SIGKILL)
    print(tables(rows, peers, peaks))
    if args.plot:
        args.plot.write_text(plot(rows))
    return int(any("rlx" in row.failures for row in rows))


if __name__ == "__main__":
    sys.exit(main())
