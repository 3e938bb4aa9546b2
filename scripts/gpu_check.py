#!/usr/bin/env python3
"""Confirm on an NVIDIA GPU what only one can show; scripts/gpu_check.sh finds a Python for it.

1. Every kernel against its reference in float64, selections and copies exactly.
2. Times at the shapes of Llama-3.1-8B, as shares of the copy bandwidth measured in the same run.
3. Where vLLM's GPU build is installed: engines with CUDA graphs against eager, with kernels against
   their references, with equal heads and with uneven ones.

Exit codes: 0, all of it was shown; 1, something is wrong; 2, it cannot run here, and says why;
3, nothing is wrong, but a part was left out or could not be told.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_cases import Result
    from gpu_engine import Outcome
    from gpu_times import Time

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "gpu.md"
PARTS = ("kernels", "times", "engine")
PASSED, FAILED, CANNOT, INCOMPLETE = range(4)


@dataclass
class Report:
    """What was found. left_out: part -> why, or what of it."""

    machine: dict[str, str]
    kernels: list[Result] = field(default_factory=list)
    bandwidth: float | None = None  # bytes a second
    times: list[Time] = field(default_factory=list)
    engine: list[Outcome] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> int:
        verdicts = [
            *(result.passed for result in self.kernels),
            *(told.passed for told in self.times if told.wanted is not None),
            *(outcome.passed for outcome in self.engine),
        ]
        if False in verdicts:
            return FAILED
        return INCOMPLETE if None in verdicts or self.left_out or not verdicts else PASSED


def reach_kernels() -> None:
    """Make `nexus_vllm` and its top-level folder kernels/ importable where it is not installed."""
    sys.path.append(str(ROOT))
    import nexus_vllm

    if importlib.util.find_spec("nexus_vllm.kernels") is None:
        nexus_vllm.__path__.append(str(ROOT))


def lacking(interpret: bool) -> str:
    """What is missing to run here; empty where nothing is."""
    for module in ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed in {sys.executable}; leave out --python to have it"
    if interpret:
        return ""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "TRITON_INTERPRET is set, so that nothing would run on the GPU; unset it"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA (an NVIDIA GPU is needed, too)"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU: torch.cuda.is_available() is False; --interpret needs none"
    return ""


def machine(interpret: bool) -> dict[str, str]:
    """Where, and with what, this runs."""
    import torch

    told = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": "none: Triton's interpreter on the CPU, a check of this script only",
        "python": platform.python_version(),
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown",
    }
    if not interpret:
        device = torch.cuda.get_device_properties(0)
        told["device"] = f"{device.name}, sm_{device.major}{device.minor}"
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        told["driver"] = driver.splitlines()[0] if driver else "unknown"
        told["cuda"] = str(torch.version.cuda)
    for name in ("torch", "triton", "vllm"):
        try:
            told[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            told[name] = "not installed"
    return told


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def say(line: str) -> None:
    print(line, flush=True)


# Parts -------------------------------------------------------------------------------------------


def check_kernels(report: Report, device: str) -> None:
    import torch
    from gpu_cases import CHECKS, Place, Result, run, uncovered

    place = Place(torch.device(device), small=device == "cpu")
    for check in CHECKS:
        result = run(check, place)
        report.kernels.append(result)
        limit = f"at most {result.limit:g}" if result.limit else "must be 0"
        say(
            f"  {'pass' if result.passed else 'FAIL'}  {result.kernel:<24} "
            f"{result.compared:>3} cases, off by {result.worst:.2g} ({limit}), "
            f"{result.seconds:.1f} s"
        )
        for failure in result.failures[:5]:
            say(f"        {failure}")
        if len(result.failures) > 5:
            say(f"        and {len(result.failures) - 5} more")
    for kernel in sorted(uncovered()):
        report.kernels.append(Result(kernel, 0, failures=["there is no check of it"]))
        say(f"  FAIL  {kernel}: there is no check of it in scripts/gpu_cases.py")
    if place.device.type == "cuda" and not place.has_fp8:
        report.left_out["kernels"] = "fp8: this GPU does not have the type"


def measure(report: Report) -> None:
    import torch
    from gpu_times import Clock, Time, times, verdict

    device = torch.device("cuda", torch.cuda.current_device())
    clock = Clock(device)
    report.bandwidth = clock.bandwidth()
    say(f"  a copy within the device: {report.bandwidth / 1e12:.2f} TB/s, read and written")
    for told in times(device, report.bandwidth, clock):
        if not isinstance(told, Time):
            report.left_out["times"] = told
            say(f"  left out: {told}")
            continue
        report.times.append(told)
        wanted = "" if told.wanted is None else f", at least {told.wanted:.0%}"
        say(
            f"  {verdict(told.passed):<9}  {told.live:>7,} tokens  {told.name:<16} "
            f"{told.seconds * 1e6:>9,.1f} us  {told.share:>4.0%} of the copy{wanted}"
        )


def run_engines(report: Report, model: Path | None, deadline: float) -> None:
    from gpu_engine import EngineError, bundled_model, missing, outcomes

    if why := missing():
        report.left_out["engine"] = why
        return
    try:
        folder = model or bundled_model()
    except EngineError as error:
        report.left_out["engine"] = str(error)
        return
    for outcome in outcomes(folder, deadline):
        report.engine.append(outcome)
        word = {True: "pass", False: "FAIL", None: "?   "}[outcome.passed]
        say(f"  {word}  {outcome.what}{': ' + outcome.told if outcome.told else ''}")


# Telling -----------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    from nexus_vllm.tools.bench_report import finite

    told = {
        "machine": report.machine,
        "copy_bandwidth": report.bandwidth,
        "kernels": [{**asdict(result), "passed": result.passed} for result in report.kernels],
        "times": [{**asdict(told), "passed": told.passed} for told in report.times],
        "engine": [asdict(outcome) for outcome in report.engine],
        "left_out": report.left_out,
        "exit_code": report.code,
    }
    return json.dumps(finite(told), indent=1) + "\n"


def section(report: Report) -> str:
    """What docs/gpu.md says of a run on a GPU. Nothing that was not measured is in it."""
    from gpu_times import table

    from nexus_vllm.tools.bench_report import Table, render_table

    lines = ["; ".join(f"{name} {value}" for name, value in report.machine.items()) + "."]
    if report.bandwidth is not None:
        lines += ["", f"A copy within the device: {report.bandwidth / 1e12:.2f} TB/s.", ""]
        lines += render_table(table(report.times))
    if report.kernels:
        made = Table(["kernel", "cases", "off by at most", "allowed", ""])
        for result in report.kernels:
            told = "pass" if result.passed else f"FAIL: {len(result.failures)} cases"
            numbers = [result.compared, f"{result.worst:.2g}", f"{result.limit:g}"]
            made.rows.append([result.kernel, *numbers, told])
        lines += ["", *render_table(made)]
    if report.engine:
        words = {True: "pass", False: "FAIL", None: "not told"}
        made = Table(["engines", ""])
        made.rows += [[outcome.what, words[outcome.passed]] for outcome in report.engine]
        lines += ["", *render_table(made)]
    for part, why in report.left_out.items():
        lines += ["", f"Left out of {part}: {why.splitlines()[0]}."]
    return "\n".join(lines)


def written(document: str, told: str) -> str:
    """The document with this between its marks. Raises ValueError where it has none."""
    marks = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)
    found, count = marks.subn(lambda m: f"{m[1]}\n{told}\n\n{m[2]}", document)
    if count != 1:
        raise ValueError(f"the document has {count} places for what was measured, not one")
    return found


def main() -> int:
    args = _arguments()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
        # It computes in numpy, which warns of logarithms of 0; kernels mean them.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    if why := lacking(args.interpret):
        print(f"gpu_check: {why}.", file=sys.stderr)
        return CANNOT
    reach_kernels()
    begin = time.monotonic()
    report = Report(machine(args.interpret))
    say("\n".join(f"{name}: {value}" for name, value in report.machine.items()))
    parts = args.parts if not args.interpret else ("kernels",)
    if "kernels" in parts:
        say("\n1. Kernels against float64")
        check_kernels(report, "cpu" if args.interpret else "cuda")
    if "times" in parts:
        say("\n2. Times")
        measure(report)
    if "engine" in parts:
        say("\n3. Engines")
        run_engines(report, args.model, begin + 60 * args.minutes)
    for part in PARTS:
        if part not in parts and not args.interpret:
            report.left_out[part] = "not asked for"
    say("")
    for part, why in report.left_out.items():
        say(f"Left out of {part}: {why}")
    args.json.write_text(as_json(report))
    if args.write:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), section(report)))
    words = {
        PASSED: "All of it was shown",
        FAILED: "Something is WRONG",
        INCOMPLETE: "Nothing is wrong, but not all was shown",
    }
    if args.interpret:
        words[PASSED] = "The check works in Triton's interpreter; nothing was measured"
    say(f"{words[report.code]} ({time.monotonic() - begin:.0f} s; {args.json}).")
    return report.code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--interpret", action="store_true", help="without a GPU: part 1, tiny, on the CPU")
    option("--parts", type=_parts, default=PARTS, help="some of kernels,times,engine")
    option("--model", type=Path, help="a model's folder for part 3; default: the bundled one")
    option("--minutes", type=float, default=9.5, help="part 3 starts no engine after these")
    option("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    option("--write", action="store_true", help="write what was measured into docs/gpu.md")
    args = parser.parse_args()
    if args.interpret and args.write:
        parser.error("--write: nothing is measured with --interpret")
    return args


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
