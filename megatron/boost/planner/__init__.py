"""Which layout is fastest for a model on a cluster, how long an iteration takes, how much memory it
needs, and why: a model of costs on paper, without a GPU at hand.

One module per cost, each with its formula, units and source: `gemm`, `elementwise`, `attention`,
`collectives`, `vocabulary` (embedding, head and loss), `pipeline`, `optimiser`, `memory`;
`iteration` adds them up. What is counted comes from `megatron.boost.accounting`, how fast the
hardware is from a file in `clusters/`. Times are seconds and sizes bytes, unless a name says
otherwise.
"""
