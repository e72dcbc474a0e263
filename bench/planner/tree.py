"""ByteComp's decision tree: its paths, those that the engine runs, its greedy choice, and spaces with less of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bench.planner.cases import CPU, GPU, cluster, model_pipeline, over
from cgx_ray.plan import CodecSpec
from cgx_ray.planner.joint import MAX_GAP
from cgx_ray.planner.papers.bytecomp import (
    CodecDevice,
    CodecTask,
    Move,
    MoveScope,
    TreePath,
    bytecomp,
    option_of,
    path_cost,
    paths,
)
from cgx_ray.planner.pipeline import GroupCost, Pipeline, undominated
from cgx_ray.planner.search import search
from cgx_ray.report.result import Row

TREE_GBPS = 1.0
# Figure 14 of ByteComp has VGG16 on 64 GPUs, at 25 and 100 Gbit/s between nodes. There the tree's best step is bound by
# compute with our times of kernels, whatever is left out; so slower networks. Gbit/s; seconds of compute.
CRIPPLED_MODEL, CRIPPLED_GBPS, CRIPPLED_COMPUTE_S = "vgg16", (1.0, 5.0, 10.0), 0.1
_QSGD = CodecSpec(name="qsgd")
# Longer than any step here, seconds: what a layer pays for an option that it must not have.
_FORBIDDEN_S = 1e6


def _compressed_moves(path: TreePath) -> list[Move]:
    return [task for task in path if isinstance(task, Move) and task.is_compressed]


def _devices(path: TreePath) -> set[CodecDevice]:
    return {task.device for task in path if isinstance(task, CodecTask)}


def _routines(path: TreePath, scope: MoveScope) -> list[str]:
    return [move.routine for move in _compressed_moves(path) if move.scope is scope and not move.is_rooted]


def _only_between(path: TreePath, *routines: str) -> bool:
    return len(_compressed_moves(path)) == len(routines) and _routines(path, MoveScope.BETWEEN) == [*routines]


def _alltoall_twice(path: TreePath) -> bool:
    both, scopes = ["alltoall", "allgather"], (MoveScope.INSIDE, MoveScope.BETWEEN)
    return len(_compressed_moves(path)) == 4 and all(_routines(path, scope) == both for scope in scopes)


# Section 5.3: which paths each crippled space has. Paths that compress nothing are in all but the first.
CRIPPLED: dict[str, Callable[[TreePath], bool]] = {
    "all_compression": lambda path: bool(_devices(path)),
    "gpu_compression": lambda path: _devices(path) <= {CodecDevice.GPU},
    "cpu_compression": lambda path: _devices(path) <= {CodecDevice.CPU},
    "inter_allgather": lambda path: not _devices(path) or _only_between(path, "allgather"),
    "inter_alltoall": lambda path: not _devices(path) or _only_between(path, "alltoall", "allgather"),
    "alltoall_alltoall": lambda path: not _devices(path) or _alltoall_twice(path),
    # Ours: what the engine runs, one device for all codec work of a group.
    "engine": lambda path: option_of(path, _QSGD) is not None,
}


def tree_rows(*, quick: bool) -> Iterator[Row]:
    """Yield the size of the tree, and what the engine's paths and the greedy choice take, for ResNet-101.

    quick  for AlexNet, because the greedy choice tries all paths for every tensor
    """
    found = _priced(TREE_GBPS)
    ours = [cost for path, cost in found if CRIPPLED["engine"](path)]
    yield Row(name="tree_paths", value=len(found), unit="paths", goal=None if quick else "== 4341")
    yield Row(name="tree_engine_paths", value=len(ours), unit="paths")
    layers = model_pipeline("alexnet" if quick else "resnet101", TREE_GBPS)
    all_paths, engine_paths = _with_costs(layers, [cost for _, cost in found]), _with_costs(layers, ours)
    best, engine_best = search(all_paths, max_gap=MAX_GAP), search(engine_paths, max_gap=MAX_GAP)
    yield Row(name="tree_undominated_paths", value=len(all_paths.costs), unit="paths")
    yield Row(name="tree_best_ms", value=1e3 * best.finish_s, unit="ms")
    yield Row(name="tree_engine_over_best", value=engine_best.finish_s / best.finish_s, unit="x")
    holds_nothing_up = [index for index, cost in enumerate(all_paths.costs) if cost.compute_s(1) == 0]
    dense = min(holds_nothing_up, key=lambda index: all_paths.costs[index].network_s(1 << 20))
    rest = [index for index in range(len(all_paths.costs)) if index != dense]
    greedy_s = all_paths.finish_s(bytecomp(all_paths, dense=dense, compressing=rest, offloaded={}))
    greedy = over(greedy_s, best.finish_s)
    yield Row(name="tree_bytecomp_over_best", value=greedy, unit="x", goal=None if quick else ">= 1")


def crippled_rows() -> Iterator[Row]:
    """Yield the best step of each crippled space over that of the whole tree (ByteComp, Figure 14)."""
    for gbps in CRIPPLED_GBPS:
        found, layers = _priced(gbps), model_pipeline(CRIPPLED_MODEL, gbps, CRIPPLED_COMPUTE_S)
        whole = _with_costs(layers, [cost for _, cost in found])
        best_s = search(whole, max_gap=MAX_GAP).finish_s
        spaces = {}
        for name, has in CRIPPLED.items():
            spaces[name] = _with_costs(layers, [cost for path, cost in found if has(path)])
        spaces["myopic_compression"] = _alone(whole)
        for name, space in spaces.items():
            seconds = search(space, max_gap=MAX_GAP).finish_s
            yield Row(name=f"crippled_{name}_{gbps:g}gbps_over_best", value=over(seconds, best_s), unit="x")


def _priced(gbps: float) -> list[tuple[TreePath, GroupCost]]:
    network, costs = cluster(64, gbps=gbps), {CodecDevice.GPU: GPU, CodecDevice.CPU: CPU}
    return [(path, path_cost(path, network, _QSGD, costs)) for path in paths()]


def _with_costs(layers: Pipeline, costs: Sequence[GroupCost]) -> Pipeline:
    """Return `layers` with those of `costs` that no other beats at every size."""
    return replace(layers, costs=tuple(costs[index] for index in undominated(costs)))


def _alone(pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` where each layer must have the option that is fastest for it alone."""
    options = range(len(pipeline.costs))

    def alone_s(option: int, numel: int) -> float:
        return pipeline.costs[option].compute_s(numel) + pipeline.costs[option].network_s(numel)

    fastest = [min(options, key=lambda option: alone_s(option, numel)) for numel in pipeline.numel]
    tolls = (tuple(0.0 if option == own else _FORBIDDEN_S for own in fastest) for option in options)
    return replace(pipeline, tolls_s=tuple(tolls))
