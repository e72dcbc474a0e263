"""`cgx-ray demo` from options to table, picture and JSON."""

from __future__ import annotations

from rich.console import Console

from cgx_ray.bench.step import measure_step
from cgx_ray.demo.run import DemoOptions, run_demo
from cgx_ray.demo.summary import make_rows, print_summary
from cgx_ray.demo.view import format_rate
from cgx_ray.report.picture import plot_runs
from cgx_ray.report.result import write_result


def demo_command(options: DemoOptions, console: Console, json_path: str | None, *, num_bench_rounds: int) -> None:
    """Run the demo, show what came out, and write the rows if `json_path` is given."""
    result = run_demo(options, console)
    print_summary(console, result.dense, result.adaptive, result.link)
    picture = options.out / "demo.png"
    records = [result.dense] if result.adaptive is None else [result.dense, result.adaptive]
    title = (
        f"{options.workers} workers, {result.link} from {format_rate(options.rate)} to {format_rate(options.slow_rate)}"
    )
    plot_runs(records, picture, title=title)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if json_path is None:
        return
    rows = make_rows(result.dense, result.adaptive) if result.adaptive is not None else []
    console.print("measuring what the engine costs with dense gradients", highlight=False)
    write_result("demo", [*rows, *measure_step(num_rounds=num_bench_rounds)], json_path)
