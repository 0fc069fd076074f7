"""Runs the benchmarks that compare with peers, and writes what they found as one table.

    make bench
    python benchmarks/suite.py --only saving merging
    python benchmarks/suite.py --table

All of it takes about an hour on two cores, which nothing else should use. Each group of cells is a
script with a record, `records/suite-NAME.json`. The table in benchmarks/README.md has a row for a
cell: ours, the best peer, their ratio (above 1: ours is better), a limit that cannot be beaten by
much, the share of it that ours reaches, and the record. A peer that is missing is left out.
`--table` also writes the table of the GPU's record, and the five figures of the project's README.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BENCHMARKS = Path(__file__).resolve().parent
RECORDS = BENCHMARKS / "records"
GPU_RECORD = "2026-11-28-gpu-h100.jsonl"
END = "<!-- to here -->\n"
HEAD = """| cell | ours | best peer | ours / peer | limit | share of limit | record |
|---|---|---|---|---|---|---|
"""


# The project's README: cells of the suite, and rows of the GPU's record with the baseline of each.
HEADLINES = {
    "training step, gpt2-124M-50k-float32": "training step on a CPU, GPT-2 124M, fp32",
    "text to token files, fresh, two workers": "text to token files, new words, two workers",
    "generating, gpt2-124M, 1 prompt": "generating on a CPU, GPT-2 124M, fp32",
}
GPU_STEP_TOKENS = {"llama ours": 32_768, "wide fp8": 32_768, "wide fp8_lowbit": 32_768}
"""Tokens of a step of the runs in the GPU's record; of others 65,536."""
GPU_HEADLINES = {
    "1.3b cudnn": ("training step on a GPU, GPT-3 1.3B, bf16", ""),
    "gpt ours": ("the same, 8 blocks of width 2,048", "gpt plain torch"),
}


@dataclass(frozen=True)
class Row:
    """A cell of the table; figures in seconds are better the lower, all others the higher."""

    cell: str
    unit: str
    ours: float
    peers: dict[str, float]
    limit: tuple[str, float]

    @property
    def best_peer(self) -> str | None:
        best = min if self.unit == "s" else max
        return best(self.peers, key=self.peers.__getitem__) if self.peers else None

    @property
    def ratio(self) -> float | None:
        """How many times better than the best peer."""
        return self.better_than(self.peers[self.best_peer]) if self.best_peer else None

    @property
    def share(self) -> float:
        """How close to the limit; 1 is at it."""
        return self.better_than(self.limit[1])

    def better_than(self, figure: float) -> float:
        return figure / self.ours if self.unit == "s" else self.ours / figure

    def render(self, record: str) -> str:
        peer = self.best_peer
        cells = [self.cell, f"{show(self.ours)} {self.unit}"]
        cells += [f"{peer}, {show(self.peers[peer])}" if peer else "-"]
        cells += [f"{self.ratio:.2f}" if self.ratio else "-"]
        cells += [f"{self.limit[0]}, {show(self.limit[1])}", f"{self.share:.2f}", record]
        return f"| {' | '.join(cells)} |\n"


def show(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def read_cpu_step(record: Figures) -> Iterable[Row]:
    for name, cell in record["cells"].items():
        rates = {
            who: cell["cell"]["gflop"] / found["median_seconds"]
            for who, found in cell["candidates"].items()
        }
        ours = rates.pop("ours")
        limit = ("matmuls alone", cell["products_gflop_per_second"])
        yield Row(f"training step, {name}", "GFLOP/s", ours, rates, limit)


def read_saving(record: Figures) -> Iterable[Row]:
    for size in record["sizes"]:
        limits = {"save": "raw, past the cache", "load from disk": "raw", "load from memory": "raw"}
        for what, limit in limits.items():
            rates = {
                who: found["gigabytes_per_second"]["median"]
                for who, found in size[what].items()
                if "gigabytes_per_second" in found
            }
            peers = {who: rates[who] for who in ("torch.save", "DCP", "safetensors")}
            cell = f"checkpoint of {size['gigabytes']:.1f} GB, {what}"
            yield Row(cell, "GB/s", rates["ours"], peers, (limit, rates[limit]))
        stall = size["stall in the background"]
        ours, copy = (statistics.median(stall[who]["seconds"]) for who in ("ours", "plain copy"))
        yield Row(
            "checkpoint of 1.5 GB, stall of training in a background save",
            "s",
            ours,
            {},
            ("plain copy", copy),
        )


def read_tokenizing(record: Figures) -> Iterable[Row]:
    for name, file in record["files"].items():
        cases = file["cases"]

        def rate(case: str, clock: str = "wall", cases: Figures = cases) -> float:
            return float(cases[case][f"{clock}_megabytes_per_second"]["median"])

        limit = ("tokenizer alone", rate("encode alone", "work"))
        for who, what, peer in (
            ("ours", "one worker", "fast tool"),
            ("ours, two workers", "two workers", "fast tool, two cores"),
            ("ours, slice", "one worker, a slice", "default tool, slice"),
        ):
            peers = {f"Megatron-LM's {peer.split(',')[0]}": rate(peer)} if peer in cases else {}
            yield Row(f"text to token files, {name}, {what}", "MB/s", rate(who), peers, limit)
        if has_steady(cases, "ours"):
            tool = "Megatron-LM's fast tool, its own clock"
            peers = {tool: rate("fast tool", "work")} if "fast tool" in cases else {}
            cell, one = f"text to token files, {name}, steady state", rate("ours", "steady")
            yield Row(cell, "MB/s", one, peers, limit)
            if has_steady(cases, "ours, two workers"):
                two = rate("ours, two workers", "steady")
                yield Row(f"{cell}, two workers", "MB/s", two, {}, ("twice one", 2 * one))


def has_steady(cases: Figures, name: str) -> bool:
    """Whether half a file more took longer than rounds of the same file differ."""
    rounds = [cases[each]["all_wall_seconds"] for each in (name, f"{name}, half")]
    more = statistics.median(rounds[0]) - statistics.median(rounds[1])
    return bool(more > max(max(each) - min(each) for each in rounds))


def read_generating(record: Figures) -> Iterable[Row]:
    for model, found in record["models"].items():
        for case, rates in found["cases"].items():
            limit = "matmuls" if case == "long prompt" else "weights read"
            yield Row(
                f"generating, {model}, {case}",
                "tokens/s",
                rates["ours"]["tokens_per_second"],
                {"transformers": rates["transformers"]["tokens_per_second"]},
                (limit, rates["limit_tokens_per_second"]),
            )


def read_starting(record: Figures) -> Iterable[Row]:
    limit = ("import torch", record["imports"]["and torch"]["median"])
    for ranks in ("1 rank", "2 ranks"):
        ours = record[ranks]["all, to the end of the first step"]["median"]
        yield Row(f"start to first step, {ranks}", "s", ours, {}, limit)
    limit = ("bare Python", record["imports"]["interpreter alone"]["median"])
    for command, found in record["commands"].items():
        yield Row(f"command `{command}`", "s", found["median"], {}, limit)


def read_resuming(record: Figures) -> Iterable[Row]:
    seconds = record["median_seconds"]
    gigabytes = record["checkpoint_bytes"] / 1e9
    limit = ("imports and step", seconds["all"] - seconds["checkpoint loaded and verified"])
    yield Row(f"resumed to first step, {gigabytes:.1f} GB", "s", seconds["all"], {}, limit)


def read_two_ranks(record: Figures) -> Iterable[Row]:
    for name, seconds in record["presets"].items():
        one, two = (seconds[ranks]["median"] for ranks in ("1 rank", "2 ranks"))
        yield Row(f"step of two ranks, {name}", "s", two, {}, ("one rank on both cores", one))


def read_sample_index(record: Figures) -> Iterable[Row]:
    for epochs in ("1 epochs", "4 epochs"):
        ours, limit = record[epochs]["trainyard"], record[epochs]["shuffles alone, 32 bits"]
        told = epochs.removesuffix("s") if epochs.startswith("1 ") else epochs
        cell = f"order of sequences, {record['documents']:,} documents, {told}, CPU time"
        limits = ("shuffles alone", limit["cpu_seconds"])
        yield Row(cell, "s", ours["cpu_seconds"], {}, limits)


def read_merging(record: Figures) -> Iterable[Row]:
    rates = {
        who: found["megabytes_per_second"]["median"]
        for who, found in record["cases"].items()
        if who != "megabytes"
    }
    limit = ("copyfile and sync", rates["copyfile and sync"])
    peers = {"cat and sync": rates["cat and sync"]}
    yield Row("joining parts of token files", "MB/s", rates["merge"], peers, limit)


def read_wrapping(record: Figures) -> Iterable[Row]:
    for name in ("laptop", "tiny"):
        if name in record:
            seconds = {
                who: found["median_milliseconds"] / 1000
                for who, found in record[name]["candidates"].items()
            }
            ours, plain = seconds.pop("product"), ("model without wrappers", seconds.pop("plain"))
            peers = {f"FSDP2, {who}": figure for who, figure in seconds.items()}
            yield Row(f"step on one process, {name}", "s", ours, peers, plain)


def read_bubble(record: Figures) -> Iterable[Row]:
    for line in record["4 ranks that sleep"]:
        if line["micro_batches"] == 8 and line["schedule"] != "gpipe":
            schedule = f"{line['schedule']}, chunks: {line['chunks']}"
            cell = f"pipeline utilization, {schedule}, 8 micro batches"
            yield Row(
                cell, "%", 100 - 100 * line["idle"], {}, ("formula", 100 - 100 * line["formula"])
            )


@dataclass(frozen=True)
class Group:
    """A script, what it is asked in full and in small, and how its record becomes rows."""

    name: str
    script: str
    full: str
    small: str
    read: Callable[[Figures], Iterable[Row]]
    has_peers: bool = False

    @property
    def record(self) -> str:
        return f"suite-{self.name}.json"


TINY_STEP = "--rounds 2 --threads 1 --emulated --cells"
GROUPS = (
    Group(
        "cpu-step-gpt2",
        "cpu_step.py",
        "--rounds 3 --cells gpt2-10M-4k-float32,gpt2-10M-50k-float32,gpt2-124M-50k-float32,"
        "gpt2-124M-50k-bfloat16",
        f"{TINY_STEP} gpt2-tiny-float32,gpt2-tiny-bfloat16",
        read_cpu_step,
        has_peers=True,
    ),
    Group(
        "cpu-step-llama",
        "cpu_step.py",
        "--rounds 3 --cells llama-10M-4k-float32,llama-10M-50k-float32,llama-135M-49k-float32,"
        "llama-135M-49k-bfloat16",
        f"{TINY_STEP} llama-tiny-float32,llama-tiny-bfloat16",
        read_cpu_step,
        has_peers=True,
    ),
    Group(
        "saving",
        "saving.py",
        "--gigabytes 1.5 --rounds 5",
        "--gigabytes 0.05 --rounds 1",
        read_saving,
    ),
    Group(
        "tokenizing",
        "tokenizing.py",
        "--megabytes 300 --slice-megabytes 10 --rounds 3 --default-rounds 1",
        "--megabytes 2 --slice-megabytes 1 --rounds 1 --files repeated",
        read_tokenizing,
        has_peers=True,
    ),
    Group("generating", "generating.py", "--rounds 3", "--models tiny --rounds 1", read_generating),
    Group("starting", "starting.py", "--rounds 5", "--rounds 1 --preset tiny", read_starting),
    Group("resuming", "resuming.py", "--rounds 3", "--rounds 1 --preset tiny", read_resuming),
    Group(
        "two-ranks",
        "two_ranks.py",
        "--rounds 3 --steps 4",
        "--rounds 1 --presets tiny --steps 2",
        read_two_ranks,
    ),
    Group("sample-index", "sample_index.py", "", "--documents 20000", read_sample_index),
    Group(
        "merging",
        "merging.py",
        "--megabytes 2000 --parts 16 --rounds 5",
        "--megabytes 8 --parts 4 --rounds 1",
        read_merging,
    ),
    Group(
        "wrapping",
        "wrapping.py",
        "--threads 1 --rounds 5",
        "--threads 1 --rounds 1 --cells tiny",
        read_wrapping,
    ),
    Group(
        "bubble",
        "bubble.py",
        "--steps 5",
        "--only-sleepers --steps 1 --milliseconds 2",
        read_bubble,
    ),
)


def run(group: Group, options: argparse.Namespace, folder: Path) -> bool:
    """Runs a group's script; tells whether it wrote its record."""
    arguments = shlex.split(group.small if options.small else group.full)
    if group.has_peers and options.peers:
        arguments += ["--peers", str(options.peers.resolve())]
    command = [sys.executable, str(BENCHMARKS / group.script), *arguments]
    print(f"{group.name}: {group.script} {shlex.join(arguments)}", flush=True)
    started, log = time.monotonic(), folder / "log"
    with log.open("wb") as file:
        to_record = ["--output", str(folder / group.record)]
        code = subprocess.run([*command, *to_record], stdout=file, stderr=file).returncode
    print(f"  {'failed' if code else 'done'} after {time.monotonic() - started:.0f} s", flush=True)
    if code:
        (folder / group.record).unlink(missing_ok=True)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*lines[-15:], sep="\n  ", flush=True)
    return code == 0


def run_all(groups: Sequence[Group], options: argparse.Namespace) -> list[str]:
    """Runs groups and keeps their records; returns the names of those that failed."""
    options.output.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for group in groups:
                if not run(group, options, Path(scratch)):
                    failed.append(group.name)
        finally:  # only now: a record among the others would make the checkout dirty
            for record in Path(scratch).glob("suite-*.json"):
                shutil.move(record, options.output / record.name)
    return failed


def render_table(folder: Path) -> str:
    """Renders the rows of all records in a folder, after the commits and machines they are of."""
    rows, sources = [], set()
    for group, record in read_records(folder):
        link = f"[{group.name}](records/{group.record})"
        rows += [row.render(link) for row in group.read(record)]
        sources.add(f"Commit {record['commit']}, {record['date']}, {record['machine']}.\n")
    if not rows:
        return "No record yet.\n"
    return "".join(sorted(sources)) + "\n" + HEAD + "".join(rows)


def read_records(folder: Path) -> Iterable[tuple[Group, Figures]]:
    for group in GROUPS:
        path = folder / group.record
        if path.exists():
            yield group, json.loads(path.read_text(encoding="utf-8"))


def read_gpu() -> tuple[str, str, dict[str, Figures]]:
    """Returns the GPU's name, the date, and the rows with a measured MFU, by the median step."""
    text = (RECORDS / GPU_RECORD).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    gpu = next(line["found"] for line in lines if line.get("row") == "device")
    runs = {line["row"]: line for line in lines if line.get("unit") == "MFU"}
    for name, run in runs.items():
        # The mean of these four steps has a full collection of garbage in the first one.
        speed = 1000 * GPU_STEP_TOKENS.get(name, 65_536) / run["step_ms"]
        run["found"] *= speed / run["tokens_per_second"]
        run["tokens_per_second"] = speed
    return gpu, lines[0]["call"].split()[0], runs


def render_gpu_table(_: Path) -> str:
    """Renders the runs on a GPU: speed and memory, measured and planned."""
    gpu, date, runs = read_gpu()
    table = f"{gpu}, {date}, `records/{GPU_RECORD}`.\n\n"
    table += "| run | tokens/s | MFU, % | planned | GiB | planned |\n|---|---|---|---|---|---|\n"
    for name, run in runs.items():
        cells = [f"{run['tokens_per_second']:,.0f}", f"{100 * run['found']:.1f}"]
        if "plain torch" in name:  # plan does not describe it
            cells += ["-", f"{run['gib']:.1f}", "-"]
        else:
            cells += [f"{100 * run['mfu_plan']:.1f}", f"{run['gib']:.1f}", f"{run['gib_plan']:.1f}"]
        table += f"| {name} | {' | '.join(cells)} |\n"
    return table


def render_headlines(folder: Path) -> str:
    """Renders the five figures of the project's README, each with machine, date and record."""
    table = (
        "| figure | Trainyard | compared with | machine, date | record |\n|---|---|---|---|---|\n"
    )
    gpu, date, runs = read_gpu()
    for name, (text, baseline) in GPU_HEADLINES.items():
        run = runs[name]
        cells = [text, f"{run['tokens_per_second']:,.0f} tokens/s, MFU {100 * run['found']:.1f} %"]
        if baseline:
            other = runs[baseline]["tokens_per_second"]
            times = run["tokens_per_second"] / other
            cells += [f"plain PyTorch, {other:,.0f} ({times:.2f} times)"]
        else:
            cells += [f"`plan` had predicted {100 * run['mfu_plan']:.1f} %"]
        cells += [f"{gpu}, {date}", f"[gpu](benchmarks/records/{GPU_RECORD})"]
        table += f"| {' | '.join(cells)} |\n"
    rows = {
        row.cell: (row, group, record)
        for group, record in read_records(folder)
        for row in group.read(record)
    }
    for cell, text in HEADLINES.items():
        row, group, record = rows[cell]
        peer = row.best_peer or ""
        cells = [text, f"{show(row.ours)} {row.unit}"]
        cells += [f"{peer}, {show(row.peers[peer])} ({row.ratio:.2f} times)"]
        cells += [f"{record['machine']}, {record['date']}"]
        cells += [f"[{group.name}](benchmarks/records/{group.record})"]
        table += f"| {' | '.join(cells)} |\n"
    return table


@dataclass(frozen=True)
class Table:
    """A generated table: its page, the comment before it, and what renders it of the records."""

    page: Path
    marker: str
    render: Callable[[Path], str]


TABLES = (
    Table(BENCHMARKS / "README.md", "<!-- suite.py --table writes this -->\n", render_table),
    Table(BENCHMARKS / "README.md", "<!-- suite.py --table, the GPU -->\n", render_gpu_table),
    Table(BENCHMARKS.parent / "README.md", "<!-- suite.py --table, five -->\n", render_headlines),
)


def write_tables(folder: Path) -> None:
    """Writes each table between its comments."""
    for table in TABLES:
        before, rest = table.page.read_text(encoding="utf-8").split(table.marker)
        _, after = rest.split(END, 1)
        text = before + table.marker + table.render(folder) + END + after
        table.page.write_text(text, encoding="utf-8")


def is_dirty() -> bool:
    git = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip().endswith("-dirty")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [group.name for group in GROUPS]
    parser.add_argument("--small", action="store_true", help="seconds each, to try the scripts")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--output", type=Path, default=RECORDS)
    parser.add_argument("--peers", type=Path, help="folder with clones of what peers.toml lists")
    parser.add_argument("--list", action="store_true", help="print the groups")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    options = parser.parse_args()
    if options.list:
        for group in GROUPS:
            print(f"{group.name:15} {group.script} {group.full}")
        return
    failed = []
    if not options.table:
        if is_dirty() and not options.small:
            sys.exit("error: the checkout has changes\nhint: commit them; records name a commit")
        failed = run_all([group for group in GROUPS if group.name in options.only], options)
    if options.small:
        print(render_table(options.output), end="")
    else:
        write_tables(options.output)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
