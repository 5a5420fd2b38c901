"""The time of a matrix product.

A product `[m, k]·[k, n]` takes 2·m·n·k / (peak·e(k)) on the matrix units, e(k) = e∞ / (1 + k½/k):
the sum over k is as long as a tile's work, while loading the first operands and storing the result
take what they take whatever k is; at k = k½ a product runs at half of e∞. Or it waits for memory:
the time is the larger of that and of bytes / bandwidth (the roofline of Williams et al., 2009). A
fixed time for filling and draining the GPU is added, so that small m and n are less efficient, and
a tile that is not full takes as long as a full one: n counts in multiples of 64. A CPU's core packs
operands into its cache in turn with the arithmetic, where a GPU loads them beside it: there the
work is longer by bytes / bandwidth times `gemm_packing`, which is 0 on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.boost.accounting.products import Product
from megatron.boost.planner.cluster import Cluster

_TILE = 64


def product_seconds(product: Product, cluster: Cluster, dtype: str, itemsize: int) -> float:
    """Of one call on one GPU, without its launch."""
    compute = cluster.products(dtype)
    rate = compute.peak_tflops * 1e12 * compute.gemm_efficiency
    tiled = -(-product.n // _TILE) * _TILE / product.n
    work = product.flops * tiled / rate * (1 + compute.gemm_half_depth / product.k)
    moved = product.bytes(itemsize) / (cluster.memory.bandwidth_gb_per_s * 1e9)
    work += compute.gemm_packing * moved
    return compute.gemm_fixed_us * 1e-6 + max(work, moved)


def products_seconds(
    products: Iterable[Product], cluster: Cluster, dtype: str, itemsize: int
) -> float:
    """Of several, one after the other."""
    return sum(product_seconds(product, cluster, dtype, itemsize) for product in products)
