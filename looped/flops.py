"""How many floating-point operations training takes."""

from looped.depth import mean_loops


def flops_per_token(cfg, injection, attention: bool = True) -> float:
    """Training FLOPs per token, 2 N1 + 6 N2 + attention (paper, appendix "FLOP estimate").

    N1 counts the effective parameters run without gradient, N2 those with, at the means of the
    depth law. The head counts; token and value tables do not, nor do a mechanism's gates and
    queries (below 1 % of a core layer at 140M). injection: the class of the linear path, which says
    if every loop multiplies the state by a matrix, and by how many the input is multiplied once.
    attention: whether the products of all pairs of tokens (PaLM's count) are counted too.
    """
    d = cfg.d_model
    block = cfg.block_matmul()
    ends = cfg.n_prelude + cfg.n_coda
    without, learning = mean_loops(cfg.sampling, cfg.mu_rec, cfg.mu_bwd)
    loop = 0
    once = ends * block + cfg.vocab_size * d
    if cfg.n_core:
        loop = cfg.n_core * block + d * d * injection.carry_is_matrix
        once += d * d * (injection.write_matrices(cfg) + cfg.readout)
    n1 = without * loop
    n2 = once + learning * loop
    flops = 2.0 * n1 + 6.0 * n2
    if attention:
        layers = 3 * ends + cfg.n_core * (without + 3 * learning)
        flops += 4 * cfg.seq_len * d * layers
    return flops
