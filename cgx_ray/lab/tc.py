"""The kernel's back end: one veth pair per host, a bridge, and htb with netem on both ends of each pair."""

from __future__ import annotations

from collections.abc import Sequence

from cgx_ray.errors import LabError
from cgx_ray.lab.link import MTU_BYTES, Direction, LinkState
from cgx_ray.lab.system import ip_batch, tc_batch

# Large enough for everything that the sockets of a host have in flight: behind a network card the sender waits and
# nothing is dropped. Drops would make a change of rate look like loss.
_QUEUE_BYTES = 16 << 20
# htb makes up for late timers within a burst: a shorter one loses rate on a busy machine.
_BURST_S = 0.001
_MIN_BURST_BYTES = 10_000
# netem limits packets, whatever their size.
_NETEM_PACKETS = 100_000


def qdisc_line(device: str) -> str:
    """Return the line of `tc -batch` that prepares the device for `rate_line`."""
    return f"qdisc add dev {device} root handle 1: htb default 1"


def rate_line(device: str, bit_per_s: float) -> str:
    """Return the line of `tc -batch` that limits the rate at which packets leave the device, while traffic flows.

    htb sends a packet when it has any credit and then waits until the whole packet is paid for. So packets of 64 KiB,
    which a network card would segment, need no larger burst.
    """
    burst = max(_MIN_BURST_BYTES, int(bit_per_s / 8 * _BURST_S))
    shape = f"rate {int(bit_per_s)}bit burst {burst} cburst {burst} quantum 60000"
    return f"class replace dev {device} parent 1: classid 1:1 htb {shape}"


def queue_line(device: str, queue_bytes: int = _QUEUE_BYTES) -> str:
    """Return the line of `tc -batch` that lets `queue_bytes` wait for the rate."""
    return f"qdisc replace dev {device} parent 1:1 handle 10: bfifo limit {queue_bytes}"


def netem_line(device: str, state: LinkState) -> str:
    """Return the line of `tc -batch` for delay, jitter and loss, which apply before the rate."""
    delay_us, jitter_us = state.latency_s / 2 * 1e6, state.jitter_s / 2 * 1e6
    queue = _NETEM_PACKETS if state.queue_bytes is None else max(1, state.queue_bytes // 1500)
    effect = f"delay {delay_us:.0f}us {jitter_us:.0f}us loss {state.loss_of_link * 100:.6f}% limit {queue}"
    return f"qdisc replace dev {device} parent 1:1 handle 20: netem {effect}"


class TcNetwork:
    """Links between the hosts' `namespaces` and a bridge in namespace `switch`."""

    def __init__(self, switch: str, namespaces: Sequence[str]) -> None:
        self.switch = switch
        self.namespaces = namespaces

    def make(self) -> None:
        lines = ["link add br0 type bridge", "link set br0 up"]
        for host, namespace in enumerate(self.namespaces):
            lines.append(f"link add v{host} type veth peer name eth0 netns {namespace}")
            lines.append(f"link set v{host} master br0 up")
        ip_batch(self.switch, lines)
        tc_batch(self.switch, [qdisc_line(f"v{host}") for host in range(len(self.namespaces))])
        for namespace in self.namespaces:
            tc_batch(namespace, [qdisc_line("eth0")])

    def set(self, host: int, direction: Direction, state: LinkState) -> None:
        if state.mtu_bytes != MTU_BYTES:
            raise LabError(f"back end tc cannot lose packets by size; leave mtu {state.mtu_bytes} out")
        namespace, device = (self.namespaces[host], "eth0") if direction == "up" else (self.switch, f"v{host}")
        has_rate_only = not (state.latency_s or state.loss) and state.queue_bytes is None
        leaf = queue_line(device) if has_rate_only else netem_line(device, state)
        try:
            tc_batch(namespace, [rate_line(device, state.rate_bit_per_s), leaf])
        except LabError as error:
            if "kind is unknown" not in str(error):
                raise
            raise LabError(
                "this lab was made for rates only and the kernel has no netem; make the lab with latency_s, even 0"
            ) from error

    def connect(self, host: int, is_connected: bool) -> None:
        ip_batch(self.switch, [f"link set v{host} {'master br0' if is_connected else 'nomaster'}"])
