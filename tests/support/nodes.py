"""Emulated nodes: ranks share memory only with the ranks that are said to be on their node."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from cgx_ray.codecs import Memory, make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Exchange, Phases, Transport, make_exchange
from cgx_ray.collectives.transport import tcp
from cgx_ray.collectives.transport.transport_like import Handle
from cgx_ray.plan import CodecSpec, Intra, Layer, Scheme
from cgx_ray.runtime_ext.mesh import Parts, flat
from support.ranks import TIMEOUT_S
from support.scheme_cases import PAIRS

Nodes = tuple[int, ...]
INSIDE_CODECS = ("fp16", "bf16", "qsgd", "terngrad", "ef_signsgd", "onebit")
# All allowed triples of codec, scheme and intra.
CASES = [(codec, scheme, "dense") for codec, scheme in PAIRS] + [
    (codec, scheme, "compressed") for codec, scheme in PAIRS if codec.split(":")[0] in INSIDE_CODECS
]
NUMEL = 3001
# One layer of 200 rows of 10, which powersgd must not cut, and one of the rest.
LAYERS = [Layer(name="a", numel=2000, ndim=2, num_rows=200), Layer(name="b", numel=NUMEL - 2000, ndim=1)]


class Counting(Transport):
    """A transport that counts the bytes it sends to other nodes."""

    num_sent = 0

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        here = self.nodes[self.rank]
        self.num_sent += sum(m.numel() * m.element_size() for peer, m in flat(sends) if self.nodes[peer] != here)
        return super().start(sends, receives)


def connect(nodes: Nodes, inside: str) -> Counting:
    """Connect all ranks. `inside`: "shm" for shared memory inside nodes, or messages over "tcp" or "gloo"."""
    assert dist.group.WORLD is not None
    mesh = None
    if inside != "gloo":
        key = f"node {nodes[dist.get_rank()]}"
        tcp.host_key = lambda: key
        mesh = tcp.connect_mesh(dist.group.WORLD, TIMEOUT_S, shared_memory=inside == "shm")
    transport = Counting(dist.group.WORLD, None, mesh, TIMEOUT_S)
    if inside != "shm":
        transport.nodes = list(nodes)
    return transport


def make(case: tuple[str, str, str], transport: Transport, numel: int = NUMEL) -> tuple[Exchange, Memory | None]:
    text, scheme, intra = case
    codec = make_codec(CodecSpec.parse(text), LAYERS if numel == NUMEL else [], transport.world_size)
    return make_exchange(codec, Scheme(scheme), numel, 4, transport, Intra(intra)), codec.new_memory(numel)


def run(exchange: Exchange, grad_N: torch.Tensor, memory: Memory | None, codec: str, step: int = 0) -> None:
    stamp = Stamp(plan_version=0, step=step, group=1, codec=CodecSpec.parse(codec).name)
    exchange.run(grad_N, memory, stamp, 0, Phases())
