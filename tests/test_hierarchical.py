"""Hierarchical schemes: nodes are emulated by telling the transport which rank is on which."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT_S, run_ranks
from test_schemes import PAIRS

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import POWERSGD_Q
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Phases, Transport, make_exchange
from cgx_ray.collectives.tcp import connect_mesh
from cgx_ray.plan import CODECS_OF_SCHEME, CodecSpec, Intra, Layer, Scheme


def transport(nodes, kind="tcp"):
    mesh = connect_mesh(dist.group.WORLD, TIMEOUT_S) if kind == "tcp" else None
    return Transport(dist.group.WORLD, None, mesh, TIMEOUT_S, nodes=nodes)


def _accumulate(rank, pairs, nodes, numel, steps, kind):
    t = transport(nodes, kind)
    out = []
    for ctext, scheme, intra in pairs:
        spec = CodecSpec.parse(ctext)
        layers = [
            Layer(name="a", numel=numel * 2 // 3, ndim=2, num_rows=1),
            Layer(name="b", numel=numel - numel * 2 // 3, ndim=1),
        ]
        codec = make_codec(spec, layers, dist.get_world_size())
        ex = make_exchange(codec, Scheme(scheme), numel, 4, t, Intra(intra))
        mem = codec.new_memory(numel)
        res = []
        given = torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            g = torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + step))
            given += g
            ex.run(g, mem, Stamp(plan_version=0, step=step, group=1, codec=spec.name), 0, Phases())
            if mem is not None:
                mem.commit()
            res.append(g)
        out.append((res, given, mem.residual_N.clone() if mem is not None else None))
    dist.barrier()
    t.close()
    return out


CASES = [
    (c, s, i)
    for c, s in PAIRS
    for i in ("dense", "compressed")
    if i == "dense" or (s != "dense" and c.split(":")[0] in CODECS_OF_SCHEME[Scheme.SRA])
]


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1, 0), (0, 0, 0), (0, 1, 2, 1, 0, 0, 0)])
def test_try(nodes, kind):
    cases = [(c.replace("dgc:", "dgc:momentum=0,"), s, i) for c, s, i in CASES]
    results = run_ranks(len(nodes), _accumulate, cases, nodes, 3001, 4, kind)
    bad = []
    for k, case in enumerate(cases):
        rs = [r[k] for r in results]
        same = all(torch.equal(a, b) for r in rs[1:] for a, b in zip(r[0], rs[0][0]))
        sent = torch.stack(rs[0][0]).double().sum(0)
        given = torch.stack([r[1] for r in rs]).mean(0)
        owed = torch.stack([r[2] for r in rs]).double().mean(0) if rs[0][2] is not None else torch.zeros(3001)
        err = float((sent + owed - given).abs().max())
        if (
            not same
            or (err > 1e-4 and rs[0][2] is not None and "clip" not in case[0])
            or case[0] == "none"
            and err > 1e-4
        ):
            bad.append((case, same, err))
        print(case, same, err)
    assert not bad, bad
