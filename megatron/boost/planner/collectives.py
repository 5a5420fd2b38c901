"""The time of a collective: α + sent bytes / β (the α–β model of Hockney, 1994), with the bytes
that a rank of a ring sends (`accounting.collectives`).

A group that fits in a node uses the node's link. A larger one crosses nodes, and each of its
members in a node brings its GPU's share of the network, so that β is their sum, as long as the
node's own link is faster; its α is that of a tree over the nodes, log₂ of their number times one
hop's. β is given by the number of ranks; between two given numbers the nearest
smaller one's holds, since a link that is there for four is there for five.
"""

from __future__ import annotations

import math

from boost_layers.communication import Operation
from megatron.boost.accounting.collectives import operation_wire_bytes
from megatron.boost.planner.cluster import Cluster, Link


def collective_seconds(
    operation: Operation, size: float, ranks: int, cluster: Cluster, *, spread: int = 1
) -> float:
    """Of one collective of `size` bytes, as the accounting counts them.

    `spread` is the distance of neighbours in the group, in GPUs: 1 for tensor-parallel ranks, T for
    the data-parallel ranks behind them.
    """
    if ranks == 1:
        return 0.0
    sent = operation_wire_bytes(operation, size, ranks)
    within = bytes_per_second(cluster.node, ranks)
    if ranks * spread <= cluster.gpus_per_node:
        return _seconds(cluster.node, sent, within)
    members = max(1, cluster.gpus_per_node // spread)
    across = members * bytes_per_second(cluster.network, ranks)
    rate = min(across, within) if members > 1 else across
    nodes = -(-ranks // members)
    return _seconds(cluster.network, sent, rate, hops=math.ceil(math.log2(nodes)))


def point_to_point_seconds(size: float, gpus: int, cluster: Cluster) -> float:
    """Of a tensor sent to the next pipeline stage, by the slowest of the links between the stages
    of a model on that many GPUs."""
    link = cluster.node if gpus <= cluster.gpus_per_node else cluster.network
    return _seconds(link, size, bytes_per_second(link, 2))


def bytes_per_second(link: Link, ranks: int) -> float:
    """β of a group."""
    known = sorted((int(number), rate) for number, rate in link.bus_gb_per_s.items())
    fitting = [rate for number, rate in known if number <= ranks] or [known[0][1]]
    return fitting[-1] * 1e9


def _seconds(link: Link, sent: float, rate: float, *, hops: int = 1) -> float:
    """Without bandwidth nothing ever arrives."""
    latency = hops * link.latency_us * 1e-6
    if not sent:
        return latency
    return latency + sent / rate if rate else math.inf
